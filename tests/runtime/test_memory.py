"""Which units hold whole parameters at which moment, as an observer is told, and as their storages show."""

from __future__ import annotations

import copy
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_observed,
    draw,
    on_ranks,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    units_of,
)
from polyshard.interfaces import Observer, UnitEvent, UnitOperation, UnitSpec
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


class Log:
    """Writes down what every unit does, and holds every claim about memory against the units' own storages."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gathered: set[str] = set()
        self.arrived: set[str] = set()
        self.computing: list[tuple[str, bool]] = []
        self.waiting: list[str] = []
        self.reducing: list[str] = []
        self.peak = 0
        self.model: nn.Module | None = None

    @polyshard.hookimpl
    def after_shard(self, model: nn.Module) -> None:
        self.model = model

    @polyshard.hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer:
        return self.observe

    def observe(self, event: UnitEvent) -> None:
        unit, name = event.unit, event.unit.name
        match event.operation, event.begins:
            case UnitOperation.GATHER, True:
                # What an earlier forward left gathered is filled again in place: its master may have changed since.
                self.gathered.add(name)
                self.peak = max(self.peak, len(self.gathered - {""}))
                self.arrived.discard(name)
                self._note("unshard", unit)
            case UnitOperation.GATHER, False:
                assert name in self.gathered
                self.arrived.add(name)
            case UnitOperation.COMPUTE, True:
                assert name in self.arrived
                self.computing.append((name, event.backward))
                self._note("backward" if event.backward else "forward", unit)
            case UnitOperation.COMPUTE, False:
                self.computing.remove((name, event.backward))
            case UnitOperation.WAIT, True:
                self.waiting.append(name)
            case UnitOperation.WAIT, False:
                # Nothing is issued for another unit in between.
                assert name == self.waiting.pop()
            case UnitOperation.REDUCE, True:
                # Parameters and reduction buffers are not alive together.
                assert name not in self.gathered
                self.reducing.append(name)
                self._note("reduce", unit)
            case UnitOperation.REDUCE, False:
                # In the order in which they were issued.
                assert name == self.reducing.pop(0)
            case UnitOperation.RELEASE, _:
                self.gathered.remove(name)
                self.arrived.discard(name)
                self._note("reshard", unit)

    def take(self) -> list[str]:
        """The events so far, which are forgotten."""
        events, self.events = self.events, []
        return events

    def _note(self, event: str, unit: UnitSpec) -> None:
        self.events.append(f"{event} {unit.name.removeprefix('blocks.') or 'root'}")
        assert self.model is not None
        for each in root_of(self.model).units:
            has_memory = each.gathered.buffer.flat.untyped_storage().nbytes() > 0
            assert has_memory == (each.spec.name in self.gathered), f"{each.name} at {self.events[-1]}"


def watched(rank: int, world: ThreadedWorld, blocks: int = 3, **settings: Any) -> tuple[nn.Module, Log]:
    log = Log()
    model = seeded(lambda: Net(blocks))
    # Each unit by itself, unless a test asks for batches.
    settings = {"batch_nbytes": 0, **settings}
    return sharded_copy(model, rank, world, policy=units_of(Block), listeners=[log], **settings), log


def forward(model: nn.Module, turn: int = 0, rank: int = 0) -> torch.Tensor:
    return model(draw(4, 3, turn=turn, rank=rank)).square().mean()


FIRST_FORWARD = """
    unshard root, forward root,
    unshard 0, forward 0, reshard 0,
    unshard 1, forward 1, reshard 1,
    unshard 2, forward 2, reshard 2
"""
NEXT_FORWARD = """
    unshard root, forward root, unshard 0,
    forward 0, unshard 1, reshard 0,
    forward 1, unshard 2, reshard 1,
    forward 2, reshard 2
"""
BACKWARD = """
    backward root, unshard 2,
    backward 2, unshard 1, reshard 2, reduce 2,
    backward 1, unshard 0, reshard 1, reduce 1,
    backward 0, reshard 0, reduce 0,
    reshard root, reduce root
"""


def listed(text: str) -> list[str]:
    return [event.strip() for event in text.split(",")]


def test_full_shard_gathers_one_unit_ahead_in_forward_and_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, log = watched(rank, world)
        for turn in range(3):
            loss = forward(model, turn, rank)
            # The order is known from the first forward on.
            assert log.take() == listed(NEXT_FORWARD if turn else FIRST_FORWARD)
            assert log.gathered == {""}
            loss.backward()
            assert log.take() == listed(BACKWARD)
            assert log.gathered == set()
            # What began has ended.
            assert (log.computing, log.waiting, log.reducing) == ([], [], [])

    on_ranks(2, on_rank)


def test_shard_grad_op_gathers_once_a_step_and_keeps_until_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, log = watched(rank, world, strategy="shard_grad_op")
        names = {"", "blocks.0", "blocks.1", "blocks.2"}
        for turn in range(3):
            loss = forward(model, turn, rank)
            events = log.take()
            assert log.gathered == names
            assert sorted(event for event in events if event.startswith("unshard")) == [
                "unshard 0",
                "unshard 1",
                "unshard 2",
                "unshard root",
            ]
            assert not any(event.startswith("reshard") for event in events)
            loss.backward()
            assert [event for event in log.take() if not event.startswith("backward")] == listed(
                "reshard 2, reduce 2, reshard 1, reduce 1, reshard 0, reduce 0, reshard root, reduce root"
            )

    on_ranks(2, on_rank)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_without_gradients_releases_everything(strategy: str, mode: Any) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, log = watched(rank, world, strategy=strategy)
        model.eval()
        for _ in range(2):
            with mode():
                forward(model)
            assert log.gathered == set()
            assert root_of(model).gathered == ()

    on_ranks(2, on_rank)


def test_a_model_may_be_sharded_inside_inference_mode() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        with torch.inference_mode():
            polyshard.shard(mine, threaded(world, rank, policy=units_of(Block)))
            mine(draw(4, 3))
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


def test_a_unit_that_is_skipped_is_released_again_and_not_gathered_ahead_any_more() -> None:
    class Skips(Net):
        skipped = -1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for index, block in enumerate(self.blocks):
                if index != self.skipped:
                    x = block(x)
            return self.last(x)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        log = Log()
        model = sharded_copy(seeded(Skips), rank, world, policy=units_of(Block), listeners=[log], batch_nbytes=0)
        forward(model).backward()
        model.skipped = 1
        for turn in range(2):
            log.take()
            loss = forward(model)
            assert log.gathered == {""}
            assert ("unshard 1" in log.take()) == (turn == 0)
            loss.backward()
            assert log.gathered == set()
            assert "unshard 1" not in log.take()

    on_ranks(2, on_rank)


def test_an_abandoned_forward_keeps_the_root_only_and_no_later_step_gathers_more() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, log = watched(rank, world)
        forward(model)
        forward(model)
        assert log.gathered == {""}
        log.peak = 0
        forward(model).backward()
        assert log.gathered == set()
        assert log.peak <= 2

    on_ranks(2, on_rank)


def test_gradients_under_no_sync_are_kept_while_parameters_are_released() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, log = watched(rank, world)
        with polyshard.no_sync(model):
            forward(model).backward()
            assert log.gathered == set()
            assert not any(event.startswith("reduce") for event in log.take())
        forward(model).backward()
        assert sum(event.startswith("reduce") for event in log.take()) == 4

    on_ranks(2, on_rank)
