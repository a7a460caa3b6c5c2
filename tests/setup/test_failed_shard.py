"""A ``shard()`` that fails leaves the model as it was, on every rank, or one that says what happened to it."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, assert_parity, local, on_ranks, seeded, square_step, threaded, units_of
from polyshard import ShardConfig, checkpoint, errors, hookimpl
from polyshard.interfaces import (
    GatherEncoding,
    InputCast,
    Observer,
    OffloadCapabilities,
    OffloadManager,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from refusal import description
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class FullError(Exception):
    """What a plugin raises where it cannot go on: no error of polyshard's."""


class Failing:
    """Raises at the ``after + 1``-th question of the kind ``at``; ``after=None`` for never."""

    def __init__(self, at: str, after: int | None) -> None:
        self._at = at
        self._left = after

    def reach(self, what: str) -> None:
        if what == self._at and self._left is not None:
            if not self._left:
                raise FullError(f"{what} of the plugin")
            self._left -= 1


class Shelf(OffloadManager):
    """Keeps masters in memory of its own."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(offloads=True)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self._failing.reach("place")
        return shard.clone()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.clone() if into is None else into.add_(grad)


class Plain(PrecisionPlugin):
    """Sends the bytes of the parameters as they are."""

    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        self._failing.reach("dtypes")
        dtype = unit.master_dtype
        return UnitDtypes(dtype, dtype, dtype, dtype, buffer=torch.float32)

    def full_precision_in_eval(self, unit: UnitSpec) -> bool:
        self._failing.reach("full_precision_in_eval")
        return False

    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        self._failing.reach("input_cast")
        return None

    def output_cast(self, unit: UnitSpec) -> None:
        self._failing.reach("output_cast")

    def encoding(self, unit: UnitSpec) -> GatherEncoding:
        self._failing.reach("encoding")
        return GatherEncoding(-(-unit.shard_numel * unit.master_dtype.itemsize // 16) * 16)

    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        message[: shard.nbytes].copy_(shard.contiguous().view(torch.uint8))

    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        nbytes = unit.shard_numel * unit.master_dtype.itemsize
        for row, sent in zip(out, message, strict=True):
            row.copy_(sent[:nbytes].clone().view(unit.master_dtype))


class Watching:
    """A listener."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    @hookimpl
    def before_shard(self) -> None:
        self._failing.reach("before_shard")

    @hookimpl
    def after_shard(self) -> None:
        self._failing.reach("after_shard")

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        self._failing.reach("make_observer")
        return None


class OutOfMemory(TorchDispatchMode):
    """The allocator has nothing left for the ``after + 1``-th tensor of zeros of this thread that could be a master."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros.default and kwargs["dtype"].is_floating_point:
            if not self._left:
                raise torch.OutOfMemoryError("no memory")
            self._left -= 1
        return func(*args, **(kwargs or {}))


def plugins(failing: Failing) -> dict[str, Any]:
    return {"offload": Shelf(failing), "precision": Plain(failing), "listeners": [Watching(failing)]}


class Buffered(nn.Module):
    """Buffers that a plugin casts, an embedding in front, parameters of two dtypes, one of them in no order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.mixed = nn.Linear(2, 2)
        self.mixed.weight = nn.Parameter(torch.arange(6.0).view(2, 3).T[:2], requires_grad=False)
        self.register_buffer("scale", torch.linspace(0, 1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(self.net(x)) * self.scale


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a failed call must leave alone, values and strides as well."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {
        **description(model),
        "strides": {name: (tensor.shape, tensor.stride(), tensor.data_ptr()) for name, tensor in tensors.items()},
        "values": {
            name: local(tensor.detach()).flatten().tolist() for name, tensor in tensors.items() if not tensor.is_meta
        },
    }


#: Of Net with a unit a block, five units on each rank: at the first question, in the middle, and at the last.
MOMENTS = [
    *(
        (at, after)
        for at in ("place", "dtypes", "encoding", "make_observer", "input_cast", "output_cast")
        for after in (0, 2)
    ),
    ("place", 3),
    ("full_precision_in_eval", 1),
    ("before_shard", 0),
]


@pytest.mark.parametrize(("at", "after"), MOMENTS, ids=[f"{at}-{after}" for at, after in MOMENTS])
def test_a_plugin_that_raises_on_one_rank_leaves_every_rank_as_it_was(at: str, after: int) -> None:
    def wrap(model: nn.Module, config: ShardConfig) -> nn.Module:
        rank = dict(config.collectives)["rank"]  # type: ignore[call-overload]
        before = state_of(model)
        failing = Failing(at, after if rank == 1 else None)
        with pytest.raises(FullError if rank == 1 else errors.RankMismatchError, match=f"{at} of the plugin"):
            polyshard.shard(model, dataclasses.replace(config, **plugins(failing)))
        assert state_of(model) == before
        return polyshard.shard(model, dataclasses.replace(config, **plugins(Failing(at, None))))

    model = seeded(Net)
    assert_parity(model, square_step, 3, optimizer=adam, settings={"policy": units_of(Block)}, wrap=wrap)


def test_a_failed_shard_keeps_buffers_strides_and_dtypes() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Buffered).double()
        model.mixed.float()
        before = state_of(model)
        config = threaded(world, rank, policy=units_of(Block, nn.Linear), **plugins(Failing("place", 5)))
        with pytest.raises(FullError):
            polyshard.shard(model, config)
        assert state_of(model) == before

    on_ranks(2, on_rank)


def test_an_outer_shard_that_fails_leaves_the_inner_ones_sharded() -> None:
    model = seeded(Net)

    def wrap(mine: Any, config: ShardConfig) -> nn.Module:
        for block in mine.blocks:
            polyshard.fully_shard(block, config)
        before = state_of(mine)
        with pytest.raises(FullError):
            polyshard.fully_shard(mine, dataclasses.replace(config, offload=Shelf(Failing("place", 0))))
        assert state_of(mine) == before
        return polyshard.fully_shard(mine, config)

    assert_parity(model, wrap=wrap)


class Initializer:
    """Ones into every parameter and buffer, or an error at one module."""

    def __init__(self, failing: Failing) -> None:
        self._failing = failing

    def __call__(self, module: nn.Module) -> None:
        self._failing.reach("initialize")
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                nn.init.normal_(tensor)


@pytest.mark.parametrize("after", [0, 3])
def test_an_initializer_that_raises_leaves_meta_parameters_buffers_and_the_generator_as_they_were(after: int) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))
        # Not on the meta device, and in the way of an initialiser.
        model[1].running_var = torch.full((4,), 5.0)
        return model

    def on_rank(rank: int, world: ThreadedWorld) -> list[list[float]]:
        model = make()
        before = state_of(model)
        config = threaded(world, rank, policy="always", device="cpu")
        with world.lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            drawn = torch.get_rng_state()
            failing = Failing("initialize", after)
            # One rank at a time: the generator belongs to the process.
            alone = dataclasses.replace(config, check_ranks=False)
            with pytest.raises(FullError):
                polyshard.shard(model, alone, initializer=Initializer(failing))
            assert torch.equal(torch.get_rng_state(), drawn)
        assert state_of(model) == before
        with world.lock, torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            polyshard.shard(model, alone, initializer=Initializer(Failing("", None)))
        with polyshard.unsharded(model):
            return [p.detach().flatten().tolist() for p in model.parameters()]

    wanted = make().to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for module in wanted:
            Initializer(Failing("", None))(module)
    expected = [p.detach().flatten().tolist() for p in wanted.parameters()]
    assert on_ranks(2, on_rank) == [expected] * 2


def refused_by_name(model: nn.Module, config: ShardConfig, folder: Path, *words: str) -> None:
    """Every use of a broken model says what happened to it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    uses: Mapping[str, Callable[[], Any]] = {
        "forward": lambda: model(torch.ones(2, 3, dtype=torch.float64)),
        "forward of a block": lambda: model.get_submodule("blocks.0")(torch.ones(2, 5, dtype=torch.float64)),
        "shard": lambda: polyshard.shard(model, config),
        "fully_shard": lambda: polyshard.fully_shard(model, dataclasses.replace(config, policy="never")),
        "wrapper": lambda: polyshard.FullyShardedDataParallel(model, config),
        "inside another": lambda: polyshard.shard(nn.Sequential(model), config),
        "save": lambda: checkpoint.save(folder, 1, model, optimizer),
        "unsharded": lambda: polyshard.unsharded(model).__enter__(),
        "clip": lambda: polyshard.clip_grad_norm_(model, 1.0),
        "report": lambda: polyshard.report(model),
        "state_dict": model.state_dict,
    }
    for use, call in uses.items():
        with pytest.raises(errors.StateError) as caught:
            call()
        for word in ("cannot be used", "build it anew", *words):
            assert word in str(caught.value), f"{use}: {caught.value}"


@pytest.mark.parametrize("out_of_memory", [1, 2])
def test_a_rank_that_runs_out_of_memory_half_way_is_known_to_all(out_of_memory: int, tmp_path: Path) -> None:
    """The root's parameters were let go of by then: there is no way back."""

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Net)
        config = threaded(world, rank, policy=units_of(Block))
        if rank == 1:
            with pytest.raises(torch.OutOfMemoryError), OutOfMemory(out_of_memory):
                polyshard.shard(model, config)
        else:
            with pytest.raises(errors.RankMismatchError, match=r"rank 1: OutOfMemoryError: no memory"):
                polyshard.shard(model, config)
        alone = dataclasses.replace(config, check_ranks=False)
        refused_by_name(model, alone, tmp_path / str(rank), f"rank {rank}", "no memory")

    on_ranks(2, on_rank)


def test_a_rank_without_memory_for_its_first_unit_keeps_its_model() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Net)
        before = state_of(model)
        config = threaded(world, rank, policy=units_of(Block))
        with pytest.raises(torch.OutOfMemoryError), OutOfMemory(0):
            polyshard.shard(model, config)
        assert state_of(model) == before
        polyshard.shard(model, config)

    on_ranks(2, on_rank)


def test_a_listener_that_raises_behind_the_end_leaves_a_model_that_says_so(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Net)
        listener = Watching(Failing("after_shard", 0 if rank == 0 else None))
        config = threaded(world, rank, policy=units_of(Block), listeners=[listener])
        with pytest.raises(errors.RankMismatchError if rank else FullError, match="after_shard of the plugin"):
            polyshard.shard(model, config)
        alone = dataclasses.replace(config, check_ranks=False)
        refused_by_name(model, alone, tmp_path / str(rank), f"rank {rank}", "after_shard of the plugin")

    on_ranks(2, on_rank)


def test_a_broken_model_is_refused_on_the_ranks_where_it_is_not_broken_too() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Net)
            whole = copy.deepcopy(model)
        config = threaded(world, rank, policy=units_of(Block))
        if rank == 0:
            with pytest.raises(torch.OutOfMemoryError), OutOfMemory(0):
                polyshard.shard(model, config)
        else:
            with pytest.raises(errors.RankMismatchError, match="rank 0: OutOfMemoryError"):
                polyshard.shard(model, config)
        expected = errors.StateError if rank else errors.RankMismatchError
        with pytest.raises(expected, match="cannot be used"):
            polyshard.shard(model, config)
        polyshard.shard(whole, config)
        square_step(whole, 0, rank)

    on_ranks(2, on_rank)


def place_fails(rank: int) -> tuple[str, str, float]:
    model = seeded(Net)
    before = state_of(model)
    started = time.monotonic()
    config = ShardConfig(
        collectives="gloo", policy=units_of(Block), offload=Shelf(Failing("place", 2 if rank else None)), timeout_s=30.0
    )
    try:
        polyshard.shard(model, config)
    except Exception as error:
        assert state_of(model) == before
        polyshard.shard(model, ShardConfig(collectives="gloo", policy=units_of(Block), timeout_s=30.0))
        square_step(model, 0, rank)
        return type(error).__name__, str(error), time.monotonic() - started
    return "none", "", 0.0


@pytest.mark.slow
def test_a_plugin_that_fails_on_one_process_is_known_to_the_other() -> None:
    (first, text, seconds), (second, other, _) = run_processes(2, place_fails)
    assert (first, second) == ("RankMismatchError", "FullError")
    assert other == "place of the plugin"
    assert "rank 1: FullError: place of the plugin" in text
    assert seconds < 15.0
