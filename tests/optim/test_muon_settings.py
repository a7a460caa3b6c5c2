"""What users set, and how they step: Muon over shards follows the unsharded model all the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from matrices import (
    TURNS,
    Both,
    Cell,
    FormulaMuon,
    Zoo,
    exact,
    most_apart,
    reference_zoo,
    together,
    train_zoo,
    whole_parameters,
    zoo_step,
)
from parity import MakeOptimizer, draw, is_sharded, on_ranks, seeded, sharded_copy, train, units_of
from polyshard.optim import Muon, for_matrices
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Cell)}


def muon_of(model: nn.Module) -> Callable[..., torch.optim.Optimizer]:
    """Muon in fp64 for a sharded model, and the formula for any other."""
    if is_sharded(model):
        return lambda params, **settings: Muon(params, **settings, dtype=torch.float64)
    return FormulaMuon


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Matrices of one shape in groups of which every setting differs."""
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": 0.01, "momentum": 0.5, "nesterov": False},
        {"params": [], "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
        {"params": [], "lr": 0.005, "ns_coefficients": (2.0, -1.5, 0.5), "adjust_lr_fn": "original", "eps": 1e-3},
        {"params": [], "ns_steps": 0},
    ]

    def muon(matrices: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        for index, parameter in enumerate(matrices):
            groups[index % 4]["params"].append(parameter)
        return muon_of(model)(groups, lr=0.02, momentum=0.9)

    return together(model, muon)


def without_decay(model: nn.Module) -> torch.optim.Optimizer:
    return exact(model, weight_decay=0.0, momentum=0.0, nesterov=False)


def with_a_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return exact(model, lr=torch.tensor(0.02, dtype=torch.float64))


@pytest.mark.parametrize("optimizer", [in_groups, without_decay, with_a_tensor])
def test_settings(optimizer: MakeOptimizer) -> None:
    assert most_apart(train_zoo(3, optimizer), reference_zoo(3, optimizer)) < 1e-11


def closed(model: nn.Module, optimizer: torch.optim.Optimizer, turn: int, rank: int) -> float:
    """A step whose forward and backward are the optimizer's to call."""

    def closure() -> float:
        optimizer.zero_grad()
        model.zero_grad()
        return zoo_step(model, turn, rank)[0].item()

    loss = optimizer.step(closure)
    assert loss is not None
    return loss


def test_a_closure() -> None:
    model = seeded(Zoo)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        muon = Muon(for_matrices(mine).matrices, lr=0.02, dtype=torch.float64)
        # The same batch on both ranks: their mean is the gradient of either.
        return [closed(mine, muon, turn, 0) for turn in range(5)], whole_parameters(mine)

    ranks = on_ranks(2, on_rank)
    muon = FormulaMuon(for_matrices(model).matrices, lr=0.02)
    losses = [closed(model, muon, turn, 0) for turn in range(5)]
    for got, parameters in ranks:
        assert got == pytest.approx(losses, rel=1e-12)
        assert most_apart(parameters, whole_parameters(model)) < 1e-12


@pytest.mark.slow
def test_bf16_gradients_reach_fp32_masters() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return exact(model, dtype=torch.float32)

    start = seeded(Zoo).float()

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(start, rank, world, precision="bf16", **BLOCKS)
        optimizer = muon(mine)
        train(mine, optimizer, zoo_step, rank, 5)
        return whole_parameters(mine)

    trained, _ = on_ranks(2, on_rank)
    master, optimizer = start, muon(start)
    for turn in range(5):
        copies = [copy.deepcopy(master).bfloat16() for _ in range(2)]
        for rank, each in enumerate(copies):
            each(draw(4, 3, turn=turn, rank=rank).bfloat16(), turn, rank).square().mean().backward()
        for name, parameter in master.named_parameters():
            there = [p.grad.float() for p in (each.get_parameter(name) for each in copies) if p.grad is not None]
            parameter.grad = sum(there, torch.zeros_like(parameter)) / 2 if there else None
        optimizer.step()
    assert all(value.dtype is torch.float32 for value in trained.values())
    assert most_apart(trained, dict(master.named_parameters())) < 1e-3


def trained_alone(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    train(model, optimizer, zoo_step, 0, TURNS)
    return whole_parameters(model)


@pytest.mark.slow
def test_a_model_that_is_not_sharded() -> None:
    model = seeded(Zoo)
    split = for_matrices(model)
    muon = Muon(split.matrices, lr=0.02, momentum=0.9, weight_decay=0.05, dtype=torch.float64)
    both = Both(muon, torch.optim.AdamW(split.others, lr=1e-2))
    assert most_apart(trained_alone(model, cast("torch.optim.Optimizer", both)), reference_zoo(1, exact)) < 1e-11
    assert muon.state[model.wide.weight]["momentum_buffer"].shape == (6, 18)
    assert not muon.keeps_at_owners


def growing(model: nn.Module, steps: Callable[[int], Any]) -> None:
    """A group is added after half of the steps."""
    matrices = for_matrices(model).matrices
    muon = muon_of(model)(matrices[::2], lr=0.02)
    for turn in range(TURNS):
        if turn == TURNS // 2:
            muon.add_param_group({"params": matrices[1::2], "lr": 0.01, "nesterov": False})
        steps(turn)
        muon.step()
        model.zero_grad()


@pytest.mark.slow
def test_a_group_that_is_added_after_steps() -> None:
    start = seeded(Zoo)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(start, rank, world, **BLOCKS)
        growing(model, lambda turn: zoo_step(model, turn, 0))
        return whole_parameters(model)

    ranks = on_ranks(2, on_rank)
    growing(start, lambda turn: zoo_step(start, turn, 0))
    for trained in ranks:
        assert most_apart(trained, whole_parameters(start)) < 1e-11


def four_steps(models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, rank: int) -> None:
    for turn in range(4):
        for number, model in enumerate(models):
            zoo_step(model, turn + number, rank)
        optimizer.step()
        for model in models:
            model.zero_grad()


def test_one_optimizer_of_several_models_in_another_order_on_each_rank() -> None:
    """Two that are sharded, and one that is not."""
    starts = [seeded(Zoo, seed) for seed in range(3)]

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, torch.Tensor]]:
        settings: list[dict[str, Any]] = [{}, {"strategy": "no_shard"}]
        models = [sharded_copy(start, rank, world, **BLOCKS, **each) for start, each in zip(starts, settings)]  # noqa: B905
        with world.lock:
            models.append(copy.deepcopy(starts[2]))
        matrices = [p for model in (models if rank else models[::-1]) for p in for_matrices(model).matrices]
        four_steps(models, Muon(matrices, lr=0.02, dtype=torch.float64), 0)
        return [whole_parameters(model) for model in models]

    ranks = on_ranks(2, on_rank)
    four_steps(starts, FormulaMuon([p for model in starts for p in for_matrices(model).matrices], lr=0.02), 0)
    for trained in ranks:
        for got, model in zip(trained, starts, strict=True):
            assert most_apart(got, whole_parameters(model)) < 1e-11


class Slight(nn.Module):
    """Matrices of one element, of none, and one a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.single = nn.Linear(1, 1, bias=False)
        self.none = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.single(self.last(x)) + self.none.sum() + (self.none @ x.T).sum()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_matrices_of_one_element_and_of_none(ranks: int) -> None:
    start = seeded(Slight)

    def train(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
        optimizer = muon_of(model)([p for n, p in model.named_parameters() if is_sharded(model) or n != "none"])
        for turn in range(5):
            model(draw(4, 3, turn=turn)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
        return whole_parameters(model)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*NO_SHARD.*")
            model = sharded_copy(start, rank, world)
        return train(model, rank)

    results = on_ranks(ranks, on_rank)
    expected = train(start, 0)
    for trained in results:
        assert trained.pop("none").shape == (0, 4)
        assert most_apart(trained, {name: expected[name] for name in trained}) < 1e-12


@pytest.mark.slow
def test_a_copy_of_an_optimizer_goes_on_as_the_optimizer() -> None:
    model = seeded(Zoo)
    muon = Muon(for_matrices(model).matrices, lr=0.02, dtype=torch.float64)
    zoo_step(model, 0, 0)
    muon.step()
    copied_model, copied = copy.deepcopy((model, muon))
    for each, optimizer in ((model, muon), (copied_model, copied)):
        each.zero_grad()
        zoo_step(each, 1, 0)
        optimizer.step()
    assert most_apart(whole_parameters(model), whole_parameters(copied_model)) == 0


class Stacks(nn.Module):
    """Matrices by themselves, or as two stacks of three."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        up, down = torch.randn(3, 9, 6) / 3, torch.randn(3, 6, 9) / 3
        make = (lambda each: nn.Parameter(each)) if stacked else (lambda each: nn.ParameterList(each.unbind()))
        self.up, self.down = make(up), make(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.tanh(x @ up.t()) @ down.t()
        return x


def test_a_stack_is_trained_as_its_matrices_are() -> None:
    """Of three each, over four ranks."""
    start, alone = seeded(lambda: Stacks(True)), seeded(lambda: Stacks(False))
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05, "adjust_lr_fn": "match_rms_adamw"}

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(start, rank, world)
        assert not for_matrices(model).matrices
        muon = Muon(for_matrices(model, stacks=[model]).matrices, dtype=torch.float64, **settings)
        for turn in range(4):
            model(draw(4, 6, turn=turn, rank=rank)).square().mean().backward()
            muon.step()
            muon.zero_grad()
        return whole_parameters(model)

    formula = FormulaMuon(alone.parameters(), **settings)
    for turn in range(4):
        losses = [alone(draw(4, 6, turn=turn, rank=rank)).square().mean() for rank in range(4)]
        torch.stack(losses).mean().backward()
        formula.step()
        formula.zero_grad()
    expected = {name: torch.stack(list(getattr(alone, name))).detach() for name in ("up", "down")}
    for found in on_ranks(4, on_rank):
        assert most_apart(found, expected) < 1e-11
