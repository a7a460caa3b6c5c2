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
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from unit_log import Log, listed


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
        assert log.peak <= log.nbytes[""] + 2 * log.nbytes["blocks.0"]

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
