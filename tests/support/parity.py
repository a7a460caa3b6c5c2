"""The reference models, ranks that are threads, and the comparison that most tests make.

A model is trained sharded over threads, and unsharded. The reference is plain torch: every rank is a deep copy of the
model with its own buffers and its own inputs, gradients are averaged over the copies, and each copy takes the same
optimizer step. Nothing in it knows of shards.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import polyshard
import pytest
import torch
from polyshard.errors import StateError
from polyshard.interfaces import PluginContext
from polyshard.runtime.root import Root
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.tensor import DTensor

T = TypeVar("T")

_SEEDING = threading.Lock()

#: One step of one rank, forward and backward, as ``step(model, turn, rank)``; what it returns is compared (the loss,
#: gradients of inputs).
Step = Callable[[nn.Module, int, int], Sequence[torch.Tensor]]

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

#: Makes a model sharded, in place or not: ``wrap(model, config)``.
Wrap = Callable[[nn.Module, polyshard.ShardConfig], nn.Module]


class Block(nn.Module):
    """A residual block of odd sizes, so that shards are uneven."""

    def __init__(self, width: int = 5, hidden: int = 7) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Parameters of its own around a list of blocks."""

    def __init__(self, blocks: int = 3, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def chain(**layers: nn.Module) -> Any:
    """Layers of these names, one behind the other."""
    return nn.Sequential(OrderedDict(layers))


class Words(nn.Module):
    """An integer input, an embedding in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(5, 11, bias=False)

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks(self.embedding(tokens))
        return self.last(x if scale is None else x * scale)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A float64 model that is the same at every call; the global generator is left as it was."""
    # The default generator belongs to the process, and ranks are threads.
    with _SEEDING, torch.random.fork_rng(devices=[]):
        seed_all(seed)
        return make().double()


def seed_all(number: int) -> None:
    """Seed the generators of the devices that are there.

    For every kind of device that is not in use, ``torch.manual_seed`` writes down where it was called: three stacks,
    which take longer than a layer's forward.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def draw(*shape: int, turn: int = 0, rank: int = 0, requires_grad: bool = False) -> torch.Tensor:
    """A float64 input that differs by turn and rank."""
    generator = torch.Generator().manual_seed(1000 * turn + rank + 1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def mean_square(model: nn.Module, x: torch.Tensor, turn: int, rank: int) -> torch.Tensor:
    """The loss of most tests."""
    loss: torch.Tensor = model(x).square().mean()
    return loss


def stepping(
    loss_of: Callable[[nn.Module, torch.Tensor, int, int], torch.Tensor], *shape: int, grad: bool = True
) -> Step:
    """Forward and backward of ``loss_of(model, x, turn, rank)``, for an input of ``shape``, [4, 3] where none is given.

    With ``grad`` the input requires a gradient, which is compared too.
    """

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(*(shape or (4, 3)), turn=turn, rank=rank, requires_grad=grad)
        loss = loss_of(model, x, turn, rank)
        loss.backward()
        if not grad:
            return [loss.detach()]
        assert x.grad is not None
        return [loss.detach(), x.grad]

    return step


square_step = stepping(mean_square)


def accumulating_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    """Three microbatches, of which a sharded model reduces with the last alone."""
    losses = []
    for part in range(3):
        loss = model(draw(4, 3, turn=3 * turn + part, rank=rank)).square().mean()
        if part < 2 and is_sharded(model):
            with polyshard.no_sync(model):
                loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: a gradient of zeros and none at all are the same to it."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, which keeps state a parameter."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def units_of(*classes: type[nn.Module]) -> dict[str, Any]:
    """The policy that makes a unit of each module of ``classes``."""
    return {"name": "module_class", "classes": list(classes)}


def one_by_one(*axes: Any) -> pytest.MarkDecorator:
    """Cases: the first value of each axis, and every other one beside the first of all others.

    ``axes``: names of parameters, with commas, then their values: tuples where there are several names; and so on.
    """
    columns = [
        [value if "," in names else (value,) for value in values]
        for names, values in zip(axes[::2], axes[1::2], strict=True)
    ]
    first = [column[0] for column in columns]
    rows = [first]
    for place, column in enumerate(columns):
        rows += [[*first[:place], value, *first[place + 1 :]] for value in column[1:]]
    return pytest.mark.parametrize(", ".join(axes[::2]), [sum(row, ()) for row in rows])


def threaded(world: ThreadedWorld, rank: int, **settings: Any) -> polyshard.ShardConfig:
    """A configuration for one thread of ``world``."""
    return polyshard.ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, **settings)


def fake(rank: int = 0, world_size: int = 4) -> FakeCollectives:
    """One pretended rank, which writes down what it sends."""
    return FakeCollectives(PluginContext("fake", torch.device("cpu")), rank, world_size)


def on_ranks(world_size: int, function: Callable[[int, ThreadedWorld], T]) -> list[T]:
    """``function(rank, world)`` on every rank of a new world. A collective that hangs fails within seconds."""
    with one_core():
        return ThreadedWorld(world_size, timeout=10.0).run(function, timeout=30.0)


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started inside stay on the core on which this one runs now.

    One alone can hold the interpreter lock. Those of other cores try to take it whenever it is let go, which costs
    more than what the tests compute: on two cores the same tests take twice the CPU time.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    # The 39th field of what `proc_pid_stat(5)` tells, counted from behind the name.
    here = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])
    os.sched_setaffinity(0, {here})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def sharded_copy(model: nn.Module, rank: int, world: ThreadedWorld, **settings: Any) -> nn.Module:
    """A copy of ``model``, sharded."""
    with world.lock:
        mine = copy.deepcopy(model)
    return polyshard.shard(mine, threaded(world, rank, **settings))


def is_sharded(model: nn.Module) -> bool:
    """Whether a step that both take is the sharded model's, and not that of the reference."""
    try:
        polyshard.report(model)
    except StateError:
        return False
    return True


def root_of(model: nn.Module) -> Root:
    """What the units of a sharded model share."""
    root: Root = model.__dict__["_polyshard_module_state"].root
    return root


def warns_for(world_size: int, settings: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Sharding over one rank warns, unless ``no_shard`` was asked for."""
    if world_size == 1 and (settings or {}).get("strategy") != "no_shard":
        return pytest.warns(UserWarning, match="switching to use `NO_SHARD`")
    return nullcontext()


@dataclass
class Training:
    """What a training gave, on all ranks."""

    observed: list[list[list[torch.Tensor]]] = field(default_factory=list)
    """What ``step`` returned: by turn, rank and position."""
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """By turn: the whole averaged gradient of each parameter; zeros where there was none."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whole parameters after the last step."""


def train_reference(
    model: nn.Module, step: Step, world_size: int, turns: int = 2, optimizer: MakeOptimizer = sgd
) -> Training:
    """Train one unsharded copy of ``model`` a rank."""
    copies = [copy.deepcopy(model) for _ in range(world_size)]
    optimizers = [optimizer(each) for each in copies]
    result = Training()
    for turn in range(turns):
        result.observed.append([list(step(each, turn, rank)) for rank, each in enumerate(copies)])
        averaged: dict[str, torch.Tensor] = {}
        every = [dict(each.named_parameters()) for each in copies]
        for name, parameter in every[0].items():
            same = [each[name] for each in every]
            there = [each.grad for each in same if each.grad is not None]
            total = sum(there, torch.zeros_like(parameter, requires_grad=False)) / world_size
            averaged[name] = total
            for each in same:
                each.grad = total.clone() if there else None
        result.gradients.append(averaged)
        for each in optimizers:
            each.step()
            each.zero_grad()
    result.parameters = {name: value.detach() for name, value in copies[0].named_parameters()}
    return result


def train_sharded(
    model: nn.Module,
    step: Step,
    world_size: int,
    turns: int = 2,
    optimizer: MakeOptimizer = sgd,
    settings: Mapping[str, Any] | None = None,
    wrap: Wrap = polyshard.shard,
) -> Training:
    """Train ``model`` sharded over ``world_size`` threads. After every step nothing may be gathered."""

    def on_rank(
        rank: int, world: ThreadedWorld
    ) -> tuple[list[list[torch.Tensor]], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        with world.lock:
            mine = copy.deepcopy(model)
        mine = wrap(mine, threaded(world, rank, **(settings or {})))
        opt = optimizer(mine)
        observed, gradients = [], []
        for turn in range(turns):
            observed.append(list(step(mine, turn, rank)))
            assert root_of(mine).gathered == ()
            gradients.append({name: _gradient(p) for name, p in mine.named_parameters()})
            opt.step()
            opt.zero_grad()
        with polyshard.unsharded(mine):
            whole = {name: p.detach().clone() for name, p in mine.named_parameters()}
        return observed, gradients, whole

    with warns_for(world_size, settings):
        ranks = on_ranks(world_size, on_rank)
    originals = dict(model.named_parameters())
    result = Training(parameters=ranks[0][2])
    for _, _, other in ranks[1:]:
        for name, value in other.items():
            torch.testing.assert_close(value, result.parameters[name], rtol=0, atol=0)
    for turn in range(turns):
        result.observed.append([rank[0][turn] for rank in ranks])
        result.gradients.append(
            {name: whole_of(original, [rank[1][turn][name] for rank in ranks]) for name, original in originals.items()}
        )
    return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, rank: int, turns: int) -> None:
    """``turns`` steps of one rank, each from gradients of its own."""
    for turn in range(turns):
        step(model, turn, rank)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters of a sharded model; every rank calls it."""
    with polyshard.unsharded(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole_of(original: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor like ``original`` from the ranks' parts: shards in rank order, 1-D or of any dimension, or whole
    on each."""
    parts = [local(part) for part in parts]
    if all(part.shape == original.shape for part in parts):
        for part in parts[1:]:
            torch.testing.assert_close(part, parts[0], rtol=0, atol=0)
        return parts[0]
    if not original.numel():
        assert not any(part.numel() for part in parts)
        return torch.zeros_like(original)
    size = len(parts) // max(1, sum(part.numel() for part in parts) // original.numel())
    for index, part in enumerate(parts[size:]):
        # Replicas hold the same, group after group.
        torch.testing.assert_close(part, parts[index % size], rtol=0, atol=0)
    pairs = enumerate(zip(parts[0].shape, original.shape, strict=False))
    cut = [dim for dim, (own, all_of) in pairs if parts[0].ndim == original.ndim and own != all_of]
    flat = torch.cat(list(parts[:size]), *cut)
    if flat.ndim > 1:
        assert flat.shape == original.shape, f"shards hold {flat.shape} of {original.shape}"
        return flat
    assert flat.numel() == original.numel(), f"shards hold {flat.numel()} of {original.numel()} elements"
    return flat.as_strided(original.shape, original.stride())


def assert_same(sharded: Training, reference: Training, tolerance: float = 1e-12) -> None:
    """Both trainings saw the same numbers."""
    for turn, (mine, theirs) in enumerate(zip(sharded.observed, reference.observed, strict=True)):
        for rank, (values, expected) in enumerate(zip(mine, theirs, strict=True)):
            _close(values, expected, f"what rank {rank} returned in turn {turn}", tolerance)
    for turn, (got, wanted) in enumerate(zip(sharded.gradients, reference.gradients, strict=True)):
        _close_by_name(got, wanted, f"gradient in turn {turn}", tolerance)
    _close_by_name(sharded.parameters, reference.parameters, "parameter", tolerance)


def assert_observed(ranks: Sequence[Any], reference: Training) -> None:
    """What each rank returned is what ``step`` of the reference did in its first turn, to 1e-12."""
    for values, expected in zip(ranks, reference.observed[0], strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def assert_all_close(ranks: Sequence[Any], expected: Any) -> None:
    """Every rank returned ``expected``, to 1e-12."""
    for values in ranks:
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def assert_parity(
    model: nn.Module,
    step: Step = square_step,
    world_size: int = 3,
    turns: int = 2,
    optimizer: MakeOptimizer = sgd,
    settings: Mapping[str, Any] | None = None,
    wrap: Wrap = polyshard.shard,
    tolerance: float = 1e-12,
) -> None:
    """Sharded and unsharded training of ``model`` give the same losses, gradients and parameters."""
    reference = train_reference(model, step, world_size, turns, optimizer)
    # A test whose gradients are all zero would agree with anything.
    assert any(gradient.abs().max() > 0 for gradient in reference.gradients[0].values() if gradient.numel())
    assert_same(train_sharded(model, step, world_size, turns, optimizer, settings, wrap), reference, tolerance)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of ``tensor``, in the same memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    return torch.zeros_like(local(parameter.detach())) if gradient is None else local(gradient.detach()).clone()


def _close_by_name(
    got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str, tolerance: float
) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        _close([value], [wanted[name]], f"{what}: {name}", tolerance)


def _close(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], what: str, tolerance: float) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        # `assert_close`, which tells how far they are apart, takes twenty times as long.
        alike = mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device
        if not (alike and torch.allclose(mine, theirs, tolerance, tolerance)):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


#: Numbers of ranks, and ways in which they hold gradients.
WAYS: list[tuple[int, dict[str, Any]]] = [
    (2, {"strategy": "full_shard"}),
    (3, {"strategy": "shard_grad_op"}),
    (2, {"strategy": "no_shard"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]


def backward(model: nn.Module, rank: int) -> None:
    """Of one loss of ``rank``'s inputs."""
    model(draw(4, 3, rank=rank)).square().mean().backward()


def averaged(world_size: int, make: Callable[[], nn.Module] = Net) -> nn.Module:
    """The unsharded model with the mean gradient of ``world_size`` ranks."""
    copies = [seeded(make) for _ in range(world_size)]
    for rank, each in enumerate(copies):
        backward(each, rank)
    for same in zip(*(each.parameters() for each in copies), strict=True):
        same[0].grad = sum(each.grad for each in same if each.grad is not None) / world_size  # type: ignore[assignment]
    return copies[0]


def peak_of_live_bytes(function: Callable[[], Any], folder: Path) -> int:
    """Most bytes of tensor memory alive at once during ``function``, beyond those that were alive before."""
    return max(live_bytes(function, folder))


def live_bytes(function: Callable[[], Any], folder: Path) -> list[int]:
    """Bytes of tensor memory beyond those alive before, behind each allocation and release of ``function``."""
    # What earlier tests left in reference cycles must not be freed, and subtracted, in the middle.
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    changes = (event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"]))
    return list(accumulate(changes, initial=0))
