"""Training on a mesh, and the same training of a whole model in one process, which sums what all ranks did.

What ranks return is put together here, in the process of the tests, and compared with ``expected``.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import polyshard
import torch
from matrices import FormulaMuon
from meshed_models import Block, ExpertModules, GroupedExperts, Net, Shape, parallelize, shares_of, tokens_of
from parity import seeded
from polyshard.optim import Muon, for_matrices, step_in_backward
from processes import KeptRanks, device_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

T = TypeVar("T")

#: Kept for all files of tests; ``tests/meshes/conftest.py`` lets them go.
POOLS = KeptRanks()
#: Seconds that a call may take; its processes are stopped then, and the stacks of all shown.
LIMIT_S = 60.0
#: Far below the norm of gradients, so that all steps are clipped.
MAX_NORM = 0.1


@dataclass(frozen=True)
class Plan:
    """A mesh, what its dimensions mean, and a training on it."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    shape: Shape
    shard: tuple[str, ...]
    """Dimensions that ranks with the same model part cut it over."""
    replicate: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    """Dimensions that experts are cut over, of the configured mesh; the rest of their data ranks replicate."""
    by_mesh: tuple[str, ...] = ()
    """Instead of ``experts``: dimensions of the ``DeviceMesh`` that the policy gives, the last of which cuts."""
    divisor: Any = None
    """``gradient_divisor`` of experts; None for the default."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of ``ShardConfig``, beside all these."""
    optimizer: Literal["sgd", "adamw", "flat", "muon"] = "adamw"
    steps: int = 2
    """Behind the first, which shows gradients."""
    microbatches: int = 1
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        mesh = "x".join(f"{name}{size}" for name, size in zip(self.names, self.sizes, strict=True))
        changed = {
            each.name: getattr(self.shape, each.name)
            for each in fields(self.shape)
            if getattr(self.shape, each.name) != each.default
        }
        words = [f"{key}={value}" for key, value in [*changed.items(), *self.settings]]
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        return "-".join([mesh, *words, self.optimizer])

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def data(self) -> tuple[str, ...]:
        """Dimensions whose ranks see batches of their own."""
        return self.replicate + self.shard

    @property
    def data_size(self) -> int:
        return math.prod(self.size(name) for name in self.data)

    def size(self, name: str) -> int:
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def data_rank(self, coordinate: Mapping[str, int]) -> int:
        """Whose batch the rank at ``coordinate`` sees."""
        rank = 0
        for name in self.data:
            rank = rank * self.size(name) + coordinate[name]
        return rank

    def batch(self, turn: int, rank: int, part: int) -> torch.Tensor:
        return tokens_of(self.shape, turn * self.microbatches + part, rank)


@dataclass
class Ended:
    """What a training gave."""

    losses: list[list[float]] = field(default_factory=list)
    """By turn, then data rank; on a rank of the mesh its own alone."""
    norms: list[float] = field(default_factory=list)
    """By turn, before clipping."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first turn, by name."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Behind the last."""
    coordinate: dict[str, int] = field(default_factory=dict)
    """Of the rank."""


# The whole model.


def make(plan: Plan) -> Net:
    """The whole model; alike wherever it is called."""
    model = seeded(lambda: Net(plan.shape)).to(plan.dtype)
    assert isinstance(model, Net)
    return model


class StackMuon(FormulaMuon):
    """The formula, for each matrix of a 3-D parameter by itself."""

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if parameter.ndim == 2:
            super()._update(parameter, gradient, group)
            return
        views = self.state[parameter].setdefault("views", list(parameter.unbind()))
        for matrix, its in zip(views, gradient.unbind(), strict=True):
            super()._update(matrix, its, group)


def optimizers(model: nn.Module, kind: str, sharded: bool) -> list[torch.optim.Optimizer]:
    """Of a whole model, or of a sharded one."""
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.1)]
    if kind == "flat" and sharded:
        return [torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-2)]
    if kind in ("adamw", "flat"):
        return [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    assert isinstance(model, Net)
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
    if sharded:
        experts = [each for each in model.modules() if isinstance(each, GroupedExperts)]
        split = for_matrices(model, leave_out=[model.head], stacks=experts)
        return [Muon(split.matrices, dtype=torch.float64, **options), torch.optim.AdamW(split.others, lr=1e-2)]
    left = {model.embed.weight, model.head.weight}
    matrices = [each for each in model.parameters() if each.ndim > 1 and each not in left]
    others = [each for each in model.parameters() if each.ndim < 2 or each in left]
    return [StackMuon(matrices, **options), torch.optim.AdamW(others, lr=1e-2)]


@functools.cache
def expected(plan: Plan) -> Ended:
    """The training of the whole model, on the batches of all data ranks."""
    model, ended = make(plan), Ended()
    stepped: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=1.0)]
    for turn in range(1 + plan.steps):
        losses = []
        for rank in range(plan.data_size):
            parts = [model(plan.batch(turn, rank, part)) / plan.microbatches for part in range(plan.microbatches)]
            for loss in parts:
                (loss / plan.data_size).backward()
            losses.append(sum(loss.item() for loss in parts))
        ended.losses.append(losses)
        _scale_experts(model, plan)
        limit = MAX_NORM if turn else math.inf
        ended.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        if not turn:
            ended.gradients = {name: _gradient(each).clone() for name, each in model.named_parameters()}
        _step(stepped)
        if not turn:
            stepped = optimizers(model, plan.optimizer, sharded=False)
    ended.parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
    return ended


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _scale_experts(model: Net, plan: Plan) -> None:
    """Experts have the mean over all data ranks; make it the sum over them, by the divisor of ``plan``."""
    group = plan.data_size // plan.size("ep") if plan.size("ep") > 1 else plan.data_size
    divisor = {None: plan.data_size, "data": plan.data_size, "group": group, "sum": 1}.get(plan.divisor, plan.divisor)
    for module in model.modules():
        if isinstance(module, (GroupedExperts, ExpertModules)):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(plan.data_size / divisor)


def _step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for each in optimizers:
        each.step()
    for each in optimizers:
        each.zero_grad()


# A rank of the mesh.


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], device_type: str) -> DeviceMesh:
    """Made once in a process, which all tests' calls share: a group of gloo takes threads, and is never given back."""
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


class ChooseUnits:
    """The policy: blocks, and what is in them under ranks of its own."""

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        self._experts: dict[str, Any] = {}
        if plan.by_mesh:
            self._experts["mesh"] = mesh[plan.by_mesh]
        if plan.experts:
            self._experts["mesh"] = plan.experts[0] if len(plan.experts) == 1 else plan.experts
        if plan.divisor is not None:
            self._experts["gradient_divisor"] = plan.divisor

    def __call__(self, module: nn.Module) -> bool | Mapping[str, Any]:
        if isinstance(module, (GroupedExperts, ExpertModules)):
            return self._experts
        return isinstance(module, Block)


def config_of(plan: Plan, mesh: DeviceMesh) -> polyshard.ShardConfig:
    """By the names of dimensions."""
    settings: dict[str, Any] = {"timeout_s": 30.0, **dict(plan.settings)}
    if plan.replicate:
        settings.setdefault("strategy", "hybrid_shard")
        settings["replicate"] = plan.replicate[0] if len(plan.replicate) == 1 else plan.replicate
    settings["shard"] = plan.shard[0] if len(plan.shard) == 1 else plan.shard
    return polyshard.ShardConfig(mesh=mesh, policy={"name": "custom", "fn": ChooseUnits(plan, mesh)}, **settings)


@contextmanager
def meshed(plan: Plan, rank: int, device_type: str = "cpu") -> Iterator[tuple[Net, DeviceMesh]]:
    """The model of one rank: parallelised, and not sharded yet."""
    device = torch.device("cpu") if device_type == "cpu" else device_of(rank)
    mesh = mesh_of(plan.sizes, plan.names, device_type)
    with warnings.catch_warnings():
        # Torch's own, of DTensor over CPU ranks, and that of a single rank, which shards nothing.
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield parallelize(make(plan).to(device), mesh), mesh


def train(rank: int, plan: Plan, device_type: str = "cpu") -> Ended:
    """Train as ``expected`` does, on one rank."""
    with meshed(plan, rank, device_type) as (model, mesh):
        ended = Ended(coordinate=coordinate_of(mesh))
        data_rank = plan.data_rank(ended.coordinate)
        device = next(model.parameters()).device
        trainer = Polyshard(plan, model, mesh)
        stepped: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=1.0)]
        trainer.hand_over(stepped)
        before = trainer.whole()
        for turn in range(1 + plan.steps):
            losses = []
            for part in range(plan.microbatches):
                last = part == plan.microbatches - 1
                with nullcontext() if last else trainer.no_sync():
                    loss = model(plan.batch(turn, data_rank, part).to(device)) / plan.microbatches
                    loss.backward()
                losses.append(loss.detach())
            ended.losses.append([sum(each.item() for each in losses)])
            ended.norms.append(trainer.clip(MAX_NORM if turn else math.inf))
            _step(stepped)
            if not turn:
                after = trainer.whole()
                ended.gradients = {name: before[name] - after[name] for name in before}
                stepped = trainer.optimizers(plan.optimizer)
                trainer.hand_over(stepped)
        ended.parameters = trainer.whole()
        trainer.close()
    return ended


def coordinate_of(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's index in each dimension."""
    place = mesh.get_coordinate()
    assert place is not None
    return dict(zip(mesh.mesh_dim_names or (), place, strict=True))


class Polyshard:
    """What shards, steps and shows the model."""

    def __init__(self, plan: Plan, model: Net, mesh: DeviceMesh) -> None:
        self.plan, self.model, self.mesh = plan, model, mesh
        assert polyshard.shard(model, config_of(plan, mesh)) is model

    def whole(self) -> dict[str, torch.Tensor]:
        """Parameters as they are on all ranks of the tensor parallel dimension, on the CPU."""
        with polyshard.unsharded(self.model):
            return {name: full(each.detach()) for name, each in self.model.named_parameters()}

    def no_sync(self) -> Any:
        """For microbatches before the last."""
        return polyshard.no_sync(self.model)

    def clip(self, limit: float) -> float:
        """Clip, and return the norm before."""
        return polyshard.clip_grad_norm_(self.model, limit).item()

    def optimizers(self, kind: str) -> list[torch.optim.Optimizer]:
        """For the steps behind the first."""
        return optimizers(self.model, kind, sharded=True)

    def hand_over(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the one optimizer step in the backward, where that is served."""
        if ("offload", "optimizer") in self.plan.settings and self.plan.optimizer != "muon":
            step_in_backward(self.model, *optimizers, keeps_former=True)

    def close(self) -> None:
        """Give back what was taken."""
        polyshard.close(self.model)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, of all parts."""
    if isinstance(tensor, DTensor):
        assert not any(isinstance(each, Partial) for each in tensor.placements)
        tensor = tensor.full_tensor()
    return tensor.cpu().clone()


# In the process of the tests.


def run(world_size: int, target: Callable[..., T], *args: Any) -> list[T]:
    """``target(rank, *args)`` on every rank of the pool."""
    return POOLS.run(world_size, target, *args, timeout=LIMIT_S)


def assert_trains(plan: Plan, tolerance: float = 1e-12) -> list[Ended]:
    """``train`` on a mesh of gloo processes gives what the whole model does."""
    ranks = run(plan.world_size, train, plan)
    assert_as_expected(ranks, plan, tolerance)
    return ranks


def assert_as_expected(ranks: Sequence[Ended], plan: Plan, tolerance: float = 1e-12) -> None:
    """Losses of each data rank, the norm, gradients and parameters are those of the whole model."""
    wanted = expected(plan)
    # What would agree with anything.
    assert max(each.abs().max().item() for each in wanted.gradients.values()) > 1e-3
    for number, ended in enumerate(ranks):
        data_rank = plan.data_rank(ended.coordinate)
        mine, theirs = [loss for (loss,) in ended.losses], [turn[data_rank] for turn in wanted.losses]
        _close(_numbers(mine), _numbers(theirs), f"losses of rank {number}", tolerance)
        _close(_numbers(ended.norms), _numbers(wanted.norms), f"norms of rank {number}", tolerance)
    for what in ("gradients", "parameters"):
        wholes, whole = together([getattr(each, what) for each in ranks], ranks, plan), getattr(wanted, what)
        assert wholes.keys() == whole.keys()
        for name, value in wholes.items():
            _close(value, whole[name], f"{what} of {name}", tolerance)


def together(
    values: Sequence[Mapping[str, torch.Tensor]], ranks: Sequence[Ended], plan: Plan
) -> dict[str, torch.Tensor]:
    """Whole parameters: what all ranks have alike, and the experts that each rank of ``ep`` has for itself."""
    wholes: dict[str, torch.Tensor] = {}
    for place in range(plan.size("ep")):
        alike = [value for value, rank in zip(values, ranks, strict=True) if rank.coordinate.get("ep", 0) == place]
        first = sum(shares_of(plan.shape.experts, plan.size("ep"))[:place])
        for other in alike[1:]:
            for name, value in other.items():
                torch.testing.assert_close(value, alike[0][name], rtol=0, atol=0, msg=f"{name} differs among copies")
        for name, value in alike[0].items():
            if ".experts.each." in name:
                before, behind = name.split(".experts.each.")
                index, _, rest = behind.partition(".")
                wholes[f"{before}.experts.each.{first + int(index)}.{rest}"] = value
            elif ".experts." in name and plan.shape.kept == "grouped" and place:
                wholes[name] = torch.cat([wholes[name], value])
            elif name in wholes:
                torch.testing.assert_close(value, wholes[name], rtol=0, atol=0, msg=f"{name} differs over ep")
            else:
                wholes[name] = value
    return wholes


def _numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _close(got: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float) -> None:
    torch.testing.assert_close(
        got.double(), wanted.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )
