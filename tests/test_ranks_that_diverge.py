"""Ranks that went different ways after the first step are told, and get no numbers from each other's units."""

from __future__ import annotations

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool
from torch import nn


class Skipping(Net):
    """Skips blocks, or raises before one."""

    def forward(self, x: torch.Tensor, skipped: int | None = None, raises: int | None = None) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if index == raises:
                raise ZeroDivisionError("in the user's own code")
            x = x if index == skipped else block(x)
        return self.last(x)


def one_skips(model: nn.Module, rank: int) -> None:
    model(draw(4, 3, rank=rank)).sum().backward()
    model(draw(4, 3, rank=rank), skipped=1 if rank else None).sum().backward()


def one_evaluates_after_an_exception(model: nn.Module, rank: int) -> None:
    model(draw(4, 3, rank=rank)).sum().backward()
    if rank:
        with pytest.raises(ZeroDivisionError):
            model(draw(4, 3, rank=rank), raises=2)
        with torch.no_grad():
            model.eval()(draw(4, 3))
    else:
        model(draw(4, 3, rank=rank)).sum().backward()


WAYS = [one_skips, one_evaluates_after_an_exception]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch_nbytes", [0, "128 MiB"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_every_rank_is_told_before_units_of_equal_size_are_mixed_up(
    way: object, batch_nbytes: int | str, strategy: str
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        mine = sharded_copy(
            seeded(lambda: Skipping(5)),
            rank,
            world,
            policy=units_of(Block),
            batch_nbytes=batch_nbytes,
            strategy=strategy,
        )
        assert callable(way)
        with pytest.raises(RankMismatchError) as caught:
            way(mine, rank)
        return str(caught.value)

    for text in on_ranks(2, on_rank):
        assert "rank 0 wants " in text
        assert " of blocks." in text


def diverge(rank: int, way: int) -> str:
    model = polyshard.shard(seeded(lambda: Skipping(5)), polyshard.ShardConfig(timeout_s=20, policy=units_of(Block)))
    with pytest.raises(RankMismatchError) as caught:
        WAYS[way](model, rank)
    return str(caught.value)


@pytest.mark.parametrize("way", [0, 1])
def test_processes_are_told_too(way: int) -> None:
    with RankPool(2) as pool:
        for text in pool.run(diverge, way):
            assert "rank 0: all_gather of " in text
            assert "rank 1: all_gather of " in text
