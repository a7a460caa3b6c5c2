"""``partial``: which units are offloaded, and that training, clipping and state are those of the unsharded model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_parity,
    chain,
    local,
    mean_square,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    units_of,
)
from polyshard import ShardConfig
from polyshard.interfaces import OffloadManager, UnitSpec
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.offload import CpuOffload, OptimizerOffload, PartialOffload
from polyshard_testing import OffloadSuite, plugin_context
from torch import nn

CPU = torch.device("cpu")
BLOCKS = {"policy": units_of(Block)}
#: Of ``Net`` over two ranks: the units that ``units_of(Block)`` makes.
UNITS = ("(root)", "blocks.0", "blocks.1", "blocks.2")


CONTEXT = plugin_context("partial")


def partial(**options: Any) -> PartialOffload:
    return PartialOffload(CONTEXT, **options)


class Recorded(CpuOffload):
    """Notes what the engine asks of it."""

    def __init__(self) -> None:
        super().__init__(CONTEXT)
        self.calls: list[tuple[str, str]] = []

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        self.calls.append(("place", unit.label))
        return super().place(unit, shard)

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        self.calls.append(("fetch", unit.label))
        super().fetch(unit, master, own_slice)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        self.calls.append(("store_grad", unit.label))
        return super().store_grad(unit, grad, into)


def each_with_its_own(**options: Any) -> Callable[[nn.Module, polyshard.ShardConfig], nn.Module]:
    """Shards with a manager for each rank, which keep nothing of each other's."""

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        return polyshard.shard(model, dataclasses.replace(config, offload=partial(**options)))

    return wrap


class TestByPattern(OffloadSuite):
    def make(self) -> OffloadManager:
        return partial(units=["*.[0-1]"])


class TestByBudgetThatKeeps(OffloadSuite):
    def make(self) -> OffloadManager:
        return partial(device_bytes="100 B", inner="optimizer")


# --- which units ---


@pytest.mark.parametrize(
    ("options", "offloaded"),
    [
        ({"units": "blocks.0"}, UNITS[1:2]),
        ({"units": ["blocks.[02]", "(root)"]}, (UNITS[0], UNITS[1], UNITS[3])),
        ({"units": ["*"]}, UNITS),
        # A rank has half of the rows of each, rounded up, from an even element on. Of a block 4 * 5, 4 and 3 * 7: 45
        # elements of 8 bytes in four tensors, 1440 bytes. The root's come first, 3 * 3, 3, 1 * 5 and 1, each but the
        # last with one of padding: 21 * 8 * 4 = 672.
        ({"device_bytes": 671}, UNITS),
        ({"device_bytes": 672}, UNITS[1:]),
        ({"device_bytes": "2.07 KiB"}, UNITS[2:]),
        ({"device_bytes": 0}, UNITS),
        ({"device_bytes": "1 GB"}, ()),
        # Without state, two tensors: 336 + 2 * 720.
        ({"device_bytes": 1776, "state_factor": 0}, UNITS[3:]),
    ],
    ids=str,
)
def test_units_are_offloaded_by_pattern_or_budget(options: dict[str, Any], offloaded: tuple[str, ...]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[tuple[str, ...], list[str], int]:
        inner = Recorded()
        model = sharded_copy(seeded(Net), rank, world, offload=partial(**options, inner=inner), **BLOCKS)
        report = polyshard.report(model)
        return report.offloaded, [label for call, label in inner.calls if call == "place"], report.offloaded_nbytes

    sizes = {"(root)": 21 * 8} | dict.fromkeys(UNITS[1:], 45 * 8)
    for reported, placed, nbytes in on_ranks(2, on_rank):
        assert reported == offloaded
        assert tuple(placed) == offloaded
        assert nbytes == sum(sizes[name] for name in offloaded)


def spec(numel: int, trained: bool, index: int) -> UnitSpec:
    return UnitSpec(f"layers.{index}", nn.Linear, (), numel, numel, torch.float32, CPU, False, trained=trained)


class Adapted(nn.Module):
    """A frozen matrix and what is trained beside it: two units of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.adapter = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def adapted() -> Any:
    return chain(blocks=nn.Sequential(Adapted(), Adapted()))


def test_one_module_with_a_unit_here_and_one_on_the_host() -> None:
    step = stepping(mean_square, 3, 4, grad=False)

    def labels(rank: int, world: ThreadedWorld) -> tuple[str, ...]:
        # A frozen unit of 16 elements in fp64 takes 64 bytes of a rank, a trained one, the first of its module, 256.
        model = sharded_copy(seeded(adapted), rank, world, policy=units_of(Adapted), offload=partial(device_bytes=128))
        return polyshard.report(model).offloaded

    assert on_ranks(2, labels) == [("blocks.0", "blocks.1")] * 2
    assert_parity(
        seeded(adapted),
        step,
        2,
        settings={"policy": units_of(Adapted)},
        wrap=each_with_its_own(device_bytes=128, inner="optimizer"),
    )


# --- training ---


def test_units_that_stay_are_never_asked_for_and_kept_slices_cross_once() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[list[tuple[str, str]]]:
        steps = []
        for keeps in (False, True):
            inner = Recorded()
            offload = partial(units="blocks.[01]", inner=OptimizerOffload(CONTEXT, inner) if keeps else inner)
            model = sharded_copy(seeded(Net), rank, world, offload=offload, **BLOCKS)
            for turn in range(2):
                inner.calls.clear()
                square_step(model, turn, rank)
            steps.append(sorted(inner.calls))
        return steps

    stored = [("store_grad", "blocks.0"), ("store_grad", "blocks.1")]
    once = [("fetch", "blocks.0"), ("fetch", "blocks.1")]
    for plain, keeping in on_ranks(2, on_rank):
        # Both are released after forward, and gathered again for backward.
        assert plain == sorted([*once, *once, *stored])
        assert keeping == sorted([*once, *stored])


@pytest.mark.filterwarnings("ignore:polyshard is switching to use `NO_SHARD`")
def test_what_no_sync_left_is_delivered_by_a_backward_that_reaches_no_offloaded_unit() -> None:
    """On one rank, whose other parameters need no help in backward."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.offloaded = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))

        def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
            x = self.first(x)
            return x if skips else self.offloaded(x)

    torch.manual_seed(0)
    whole = Skipping().double()
    sharded = copy.deepcopy(whole)
    offload = {"name": "partial", "units": "offloaded"}
    config = ShardConfig(collectives="fake", offload=offload, policy=units_of(nn.Sequential), split_root=False)
    polyshard.shard(sharded, config)
    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3)
    for model, waiting in ((whole, nullcontext()), (sharded, polyshard.no_sync(sharded))):
        with waiting:
            model(x, False).square().sum().backward()
        model(x, True).square().sum().backward()
    for (name, wanted), found in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert found.grad is not None, name
        torch.testing.assert_close(local(found.grad), wanted.grad, rtol=1e-12, atol=1e-12)
