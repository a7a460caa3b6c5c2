"""A model with matrices of every kind, and Muon's formula in fp64, for tests of optimizers that need whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import polyshard
import torch
from parity import MakeOptimizer, Step, draw, is_sharded, on_ranks, seeded, sharded_copy, train_reference, units_of
from polyshard.optim import Muon, for_matrices
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

#: Of a training: one that leaves a matrix out, and steps before and behind it.
TURNS = 4
#: Of Newton-Schulz, as Jordan et al. print them.
_A, _B, _C = 3.4445, -4.7750, 2.0315


class Cell(nn.Module):
    """Two square matrices of one shape, and one that is tall."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width + 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.one(x)) + self.two(x)
        return x + torch.tanh(self.up(x))[..., : x.size(-1)]


class Zoo(nn.Module):
    """Tall, wide, square, transposed in memory, one row, one column, tied, frozen, and not always used."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.cells = nn.ModuleList(Cell(width) for _ in range(2))
        self.wide = nn.Linear(3 * width, width)
        self.transposed = nn.Linear(width, 3 * width, bias=False)
        self.transposed.weight = nn.Parameter(self.transposed.weight.detach().t().contiguous().t())
        self.to_one = nn.Linear(width, 1, bias=False)
        self.from_one = nn.Linear(1, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied_again = nn.Linear(width, width)
        self.tied_again.weight = self.tied.weight
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(width, width)
        self.on_some_ranks = nn.Linear(width, width, bias=False)
        self.on_some_turns = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, turn: int = 0, rank: int = 0) -> torch.Tensor:
        x = self.first(x)
        for cell in self.cells:
            x = cell(x)
        x = x + self.wide(torch.tanh(self.transposed(x)))
        x = x + self.from_one(torch.tanh(self.to_one(x)))
        x = x + self.tied_again(torch.tanh(self.tied(x)))
        x = x + self.frozen(x)
        if rank == 0:
            x = x + self.on_some_ranks(x)
        if turn % 3 != 1:
            x = x + self.on_some_turns(x)
        return self.last(self.norm(x))


def zoo_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    """Mean square of what comes out of ``Zoo``."""
    loss = model(draw(4, 3, turn=turn, rank=rank), turn, rank).square().mean()
    loss.backward()
    return [loss.detach()]


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class FormulaMuon(torch.optim.Optimizer):
    """Muon of whole matrices in their own dtype, by singular values.

    Newton-Schulz's steps leave singular vectors as they are, and make ``a s + b s^3 + c s^5`` of each singular value.
    """

    def __init__(self, params: Any, lr: float | torch.Tensor = 1e-3, **settings: Any) -> None:
        defaults = {
            "lr": lr, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "eps": 1e-7,
            "adjust_lr_fn": None, "ns_coefficients": (_A, _B, _C),
        }  # fmt: skip
        super().__init__(params, defaults | settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, beta = self.state[parameter], group["momentum"]
        mean = beta * state.get("mean", torch.zeros_like(gradient)) + (1 - beta) * gradient
        state["mean"] = mean
        update = beta * mean + (1 - beta) * gradient if group["nesterov"] else mean
        u, s, v = torch.linalg.svd(update, full_matrices=False)
        s = s / s.square().sum().sqrt().clamp(min=group["eps"])
        a, b, c = group["ns_coefficients"]
        for _ in range(group["ns_steps"]):
            s = a * s + b * s**3 + c * s**5
        rows, columns = parameter.shape
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        else:
            ratio = math.sqrt(max(1.0, rows / columns))
        lr = float(group["lr"])
        parameter.copy_((1 - lr * group["weight_decay"]) * parameter - lr * ratio * (u * s) @ v)


def together(
    model: nn.Module, muon: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """``muon`` of the matrices of ``model``, and AdamW of the others."""
    split = for_matrices(model)
    return cast("torch.optim.Optimizer", Both(muon(split.matrices), torch.optim.AdamW(split.others, lr=1e-2)))


def exact(model: nn.Module, *, dtype: torch.dtype = torch.float64, **settings: Any) -> torch.optim.Optimizer:
    """Muon in ``dtype`` where ``model`` is sharded, and the formula where it is not; AdamW of the others."""
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05, **settings}

    def muon(matrices: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if is_sharded(model):
            return Muon(matrices, **options, dtype=dtype)
        return FormulaMuon(matrices, **options)

    return together(model, muon)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters of ``model``, sharded or not."""
    with polyshard.unsharded(model) if is_sharded(model) else nullcontext():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_zoo(
    ranks: int, optimizer: MakeOptimizer, turns: int = TURNS, step: Step = zoo_step, **settings: Any
) -> dict[str, torch.Tensor]:
    """Whole parameters of a ``Zoo`` that was trained over threads; all ranks must have the same bits."""
    start = seeded(Zoo)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(start, rank, world, **{"policy": units_of(Cell), **settings})
        made = optimizer(model)
        for turn in range(turns):
            step(model, turn, rank)
            made.step()
            made.zero_grad()
        return whole_parameters(model)

    first, *others = on_ranks(ranks, on_rank)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    return first


def reference_zoo(
    ranks: int, optimizer: MakeOptimizer, turns: int = TURNS, step: Step = zoo_step
) -> dict[str, torch.Tensor]:
    """The same of unsharded copies, one a rank."""
    return train_reference(seeded(Zoo), step, ranks, turns, optimizer).parameters


def most_apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two elements of one place."""
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).detach().abs().max().item() for name in one)


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Euclidean distance, of all elements together."""
    assert one.keys() == other.keys()
    return math.sqrt(sum((one[name] - other[name]).detach().square().sum().item() for name in one))
