"""Ranks that went different ways after the first step are told, and get no numbers from each other's units."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import RankMismatchError
from polyshard.interfaces import Collectives
from polyshard_backends.gloo import GlooCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_testing import plugin_context
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
        assert "  rank 0: " in text
        assert " of blocks." in text


class Unannounced(ThreadedCollectives):
    """Ranks that do not learn of what the others issue, as over NCCL."""

    api_version = 1
    capabilities = replace(ThreadedCollectives.capabilities, announces=False)
    announce = Collectives.announce


def test_without_cheap_announcements_the_first_step_is_compared_by_name_and_size() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[str, torch.Tensor]:
        with world.lock:
            model = seeded(lambda: Skipping(3))
        collectives = Unannounced(plugin_context(), world, rank)
        polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=units_of(Block)))
        with pytest.raises(RankMismatchError) as caught:
            model(draw(4, 3, rank=rank), skipped=1 if rank else None)
        # Nothing was sent.
        return str(caught.value), model(draw(4, 3)).detach()

    expected = seeded(lambda: Skipping(3))(draw(4, 3))
    # 7 x 5, 7 and 5 x 7 elements over two ranks, in rows that are rounded up.
    size = 2 * (4 * 5 + 4 + 3 * 7)
    for rank, (text, output) in enumerate(on_ranks(2, on_rank)):
        assert text.startswith(f"Ranks are about to issue different collectives (rank {rank}):\n")
        assert f"  rank 0: all_gather of blocks.1 ({size} elements of torch.float64)\n" in text
        assert f"  rank 1: all_gather of blocks.2 ({size} elements of torch.float64)\n" in text
        torch.testing.assert_close(output, expected.detach())


def diverge(rank: int, way: int) -> str:
    model = polyshard.shard(seeded(lambda: Skipping(5)), polyshard.ShardConfig(timeout_s=20, policy=units_of(Block)))
    with pytest.raises(RankMismatchError) as caught:
        WAYS[way](model, rank)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("way", [0, 1])
def test_processes_are_told_too(way: int) -> None:
    with RankPool(2) as pool:
        for text in pool.run(diverge, way):
            assert "rank 0: all_gather of " in text
            assert "rank 1: all_gather of " in text


def announce_against_an_object(rank: int) -> str:
    """One rank sends an object where the others announce what they gather."""
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(timeout_s=5, policy=units_of(Block)))
    for _ in range(2):
        model(draw(4, 3, rank=rank)).sum().backward()
    call: Callable[[], Any] = (
        partial(polyshard.random_states, model) if rank == 1 else partial(model, draw(4, 3, rank=rank))
    )
    with pytest.raises(RankMismatchError) as caught:
        call()
    return str(caught.value)


@pytest.mark.slow
def test_ranks_that_send_objects_and_ranks_that_gather_are_told_apart() -> None:
    with RankPool(3) as pool:
        for rank, text in enumerate(pool.run(announce_against_an_object)):
            assert f"(rank {rank})" in text
            assert "  rank 1: exchange of random states" in text
            assert "  rank 2: all_gather of " in text


def watch_on_one_rank(rank: int, how: str) -> str:
    """Rank 0 alone calls what all ranks have to."""
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(timeout_s=5, policy=units_of(Block)))
    # In the first steps ranks compare more than they announce.
    model(draw(4, 3, rank=rank)).sum().backward()
    watch = polyshard.Preemption(model, ()) if how == "requested" else polyshard.Stragglers(model, every=1)
    entered = watch if rank == 0 or how != "enter" else nullcontext()

    def train() -> None:
        with entered:
            for _ in range(4):
                model(draw(4, 3, rank=rank)).sum().backward()
                if rank == 0 and isinstance(watch, polyshard.Preemption):
                    watch.requested()
                elif rank == 0 and how == "step":
                    watch.step()  # type: ignore[union-attr]

    with pytest.raises(RankMismatchError) as caught:
        train()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("requested", "exchange of requests to end"),
        ("enter", "exchange of the names of machines"),
        ("step", "exchange of step times"),
    ],
)
def test_what_all_ranks_have_to_call_and_one_does_alone_is_told(how: str, words: str) -> None:
    with RankPool(2) as pool:
        for text in pool.run(watch_on_one_rank, how):
            assert f"  rank 0: {words}" in text
            assert "  rank 1: all_gather of " in text


def objects_against_announcements(rank: int) -> str:
    collectives = GlooCollectives(plugin_context())
    assert collectives.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(3)]
    collectives.announce("the same")
    call: Callable[[], Any] = (
        partial(collectives.all_gather_object, "x" * 5000)
        if rank == 2
        else partial(collectives.announce, "all_gather of '0', " + "and many more, " * 200)
    )
    with pytest.raises(RankMismatchError) as caught:
        call()
    # What was told apart leaves the group as it was.
    assert collectives.all_gather_object(rank) == [0, 1, 2]
    return str(caught.value)


@pytest.mark.slow
def test_a_group_goes_on_behind_what_was_told_apart() -> None:
    with RankPool(3) as pool:
        for text in pool.run(objects_against_announcements):
            assert "  rank 0: all_gather of '0', and many more, " in text
            assert "  rank 2: exchange of an object" in text
            assert len(text) < 3000


def clip_otherwise(rank: int, how: str) -> tuple[str, float]:
    """Rank 1 clips to another norm than the others; then all clip alike."""
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(timeout_s=5, policy=units_of(Block)))
    for turn in range(2):
        model(draw(4, 3, rank=rank, turn=turn)).sum().backward()
    first = rank == 0
    clip = partial(polyshard.clip_grad_norm_, model)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "most": partial(clip, 1.0 if first else 2.0),
        "order": partial(clip, 1.0, 2.0 if first else 1.0),
        "error": partial(clip, 1.0, error_if_nonfinite=first),
    }
    with pytest.raises(RankMismatchError) as caught:
        ways[how]()
    clip(1.0)
    return str(caught.value), clip(1.0).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "mine", "other"),
    [
        ("most", "of order 2.0, at most 1.0", "of order 2.0, at most 2.0"),
        ("order", "of order 2.0, at most 1.0", "of order 1.0, at most 1.0"),
        ("error", "of order 2.0, at most 1.0, finite or an error", "of order 2.0, at most 1.0"),
    ],
)
def test_ranks_that_clip_otherwise_are_told(how: str, mine: str, other: str) -> None:
    with RankPool(2) as pool:
        for text, norm in pool.run(clip_otherwise, how):
            assert f"  rank 0: norm of gradients {mine}\n  rank 1: norm of gradients {other}\n" in text
            assert norm == pytest.approx(1.0, rel=1e-5)
