"""Small neighbouring units travel together: how many at once, in which order, and that no number changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, fake, on_ranks, seeded, sharded_copy, square_step, units_of
from polyshard.interfaces import Work
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from unit_log import Log, listed

BLOCKS = {"policy": units_of(Block)}
#: A gather each for up.weight, up.bias and down.weight; the root has those of its first and last layer.
OF_A_BLOCK, OF_THE_ROOT = 3, 4


def block_nbytes(ranks: int = 2) -> int:
    """Of a block's gathered parameters in float64, whose rows are padded to a multiple of ``ranks``."""
    return 8 * sum(-(-rows // ranks) * ranks * numel for rows, numel in ((7, 5), (7, 1), (5, 7)))


def pairs(blocks: int, ranks: int = 2) -> int:
    """Bytes that let this many blocks travel together, and no more."""
    return (blocks + 1) * block_nbytes(ranks) - 1


def batches_of_a_step(blocks: int, **settings: Any) -> tuple[list[int], list[int], int]:
    """How many blocks each batch of the second forward and of its backward had, and all gathers of that step."""
    model, collectives = seeded(lambda: Net(blocks)), fake()
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, **BLOCKS, **settings))
    square_step(model, 0, 0)
    collectives.calls.clear()
    collectives.batches.clear()
    loss = model(draw(4, 3)).square().mean()
    forward = list(collectives.batches)
    collectives.batches.clear()
    loss.backward()
    gathers = sum(call.operation == "all_gather" for call in collectives.calls)
    # The root's own, which is not prefetched.
    assert forward.pop(0) == OF_THE_ROOT
    return [each // OF_A_BLOCK for each in forward], [each // OF_A_BLOCK for each in collectives.batches], gathers


@pytest.mark.slow
def test_the_report_says_how_many_launches_there_are_and_why() -> None:
    for settings, before, after in (
        ({}, "neighbours go together up to 128 MiB, at most 16", "25 modules in 3 launches: neighbours"),
        ({"batch_nbytes": 0}, "each module is gathered by itself", "each module is gathered by itself"),
    ):
        model = seeded(lambda: Net(24))
        polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), **BLOCKS, **settings))
        assert polyshard.report(model).reasons["batch_nbytes"].startswith(before)
        square_step(model, 0, 0)
        assert polyshard.report(model).reasons["batch_nbytes"].startswith(after)
        assert "collectives" not in polyshard.report(model).reasons


@pytest.mark.parametrize(
    ("blocks", "batch_nbytes", "batches"),
    [
        (7, 0, [1] * 7),
        (7, block_nbytes(4), [1] * 7),
        (7, pairs(2, 4), [2, 2, 2, 1]),
        (7, pairs(3, 4), [3, 3, 1]),
        (7, pairs(4, 4), [4, 3]),
        # There are at most 16 in one.
        (24, "16 MiB", [16, 8]),
    ],
)
def test_a_batch_holds_as_many_units_as_fit(blocks: int, batch_nbytes: int | str, batches: list[int]) -> None:
    gathers = 2 * blocks * OF_A_BLOCK + OF_THE_ROOT
    assert batches_of_a_step(blocks, batch_nbytes=batch_nbytes) == (batches, batches, gathers)


def test_nothing_is_batched_that_is_not_prefetched() -> None:
    settings = {"batch_nbytes": "16 MiB", "forward_prefetch": 0, "backward_prefetch": 0}
    assert batches_of_a_step(7, **settings) == ([1] * 7, [1] * 7, 14 * OF_A_BLOCK + OF_THE_ROOT)


@pytest.mark.slow
def test_by_default_small_units_travel_together_and_large_ones_do_not() -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # 4 MiB each but for the fifth, 129 MiB.
            widths = [1024, 1024, 1024, 1024, 5824, 1024, 1024, 1024]
            self.scale = nn.Parameter(torch.ones(1))
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x.new_ones(layer.in_features)).sum() * self.scale
            return x

    collectives = fake()
    model = polyshard.shard(Sizes(), polyshard.ShardConfig(collectives=collectives, policy=units_of(nn.Linear)))
    with torch.no_grad():
        model(torch.ones(2))
        assert not collectives.batches
        model(torch.ones(2))
    assert list(collectives.batches) == [4, 3]


def watched(rank: int, world: ThreadedWorld, blocks: int, **settings: Any) -> tuple[nn.Module, Log]:
    log = Log(batched=True)
    model = sharded_copy(seeded(lambda: Net(blocks)), rank, world, listeners=[log], **BLOCKS, **settings)
    return model, log


FORWARD = """
    unshard root, unsharded root, forward root, unshard 0, unshard 1,
    unsharded 0, unsharded 1, forward 0, unshard 2, unshard 3, reshard 0, forward 1, reshard 1,
    unsharded 2, unsharded 3, forward 2, unshard 4, reshard 2, forward 3, reshard 3,
    unsharded 4, forward 4, reshard 4
"""
BACKWARD = """
    backward root, unshard 4, unshard 3,
    unsharded 4, unsharded 3, backward 4, unshard 2, unshard 1, reshard 4, backward 3, reshard 3, reduce 4, reduce 3,
    unsharded 2, unsharded 1, backward 2, unshard 0, reshard 2, backward 1, reshard 1, reduce 2, reduce 1,
    unsharded 0, backward 0, reshard 0,
    reshard root, reduce 0, reduce root
"""


def test_a_batch_is_issued_when_the_one_before_is_entered_and_arrives_as_one() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, log = watched(rank, world, 5, batch_nbytes=pairs(2))
        square_step(model, 0, rank)
        for turn in range(1, 3):
            log.take()
            loss = model(draw(4, 3, turn=turn, rank=rank)).square().mean()
            assert log.take() == listed(FORWARD)
            loss.backward()
            assert log.take() == listed(BACKWARD)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("together", [1, 2, 3, 8])
def test_no_more_is_gathered_at_once_than_the_report_says(ahead: int, together: int) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        settings = {"forward_prefetch": ahead, "backward_prefetch": ahead, "batch_nbytes": pairs(together)}
        model, log = watched(rank, world, 15, **settings)
        for turn in range(3):
            square_step(model, turn, rank)
        estimate = polyshard.report(model).gathered_nbytes
        assert log.peak <= estimate
        assert log.gathered == set()
        # The estimate is not idle: with eight blocks in one batch, it says at most three blocks too many.
        assert together < 8 or estimate - log.peak <= 3 * log.nbytes["blocks.0"]

    on_ranks(2, on_rank)


class SlowLink(FakeCollectives):
    """Gathers that take time on a clock of their own, one after the other. ``now`` is where the program stands."""

    now = free = 0.0
    #: What one takes, where a block computes for 1.
    each = 1 / 8

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        super().all_gather(out, shard).wait()
        self.free = max(self.now, self.free) + self.each
        return Arrival(self, self.free)

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return [self.all_gather(out, shard) for out, shard in pairs][-1]


class Arrival:
    def __init__(self, link: SlowLink, at: float) -> None:
        self.link, self.at = link, at

    def wait(self) -> None:
        self.link.now = max(self.link.now, self.at)
