"""``polyshard.Stragglers``: ranks that sleep are told from those that wait for them, alike on all ranks."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, draw, local, on_ranks, seeded, sharded_copy, units_of
from polyshard import Straggler
from polyshard.errors import ConfigError, StateError
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool
from torch import nn

SLEEP_S = 0.1
BLOCKS: dict[str, Any] = {"policy": units_of(Block)}


class Sleeper(nn.Module):
    """What every rank holds, and some are slow in."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def sleepy() -> nn.Sequential:
    return nn.Sequential(Block(), Sleeper(), Block(), Block())


def train(model: nn.Module, rank: int) -> None:
    model(draw(4, 5, rank=rank)).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def found_in(
    model: nn.Module, rank: int, calls: int, seconds: float, *, every: int, factor: float
) -> list[tuple[Straggler, ...]]:
    inner = [each for each in model.modules() if isinstance(each, Sleeper)]
    inner[0].seconds = seconds
    answers = []
    with polyshard.Stragglers(model, every=every, factor=factor) as stragglers:
        for _ in range(calls):
            train(model, rank)
            answers.append(stragglers.step())
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("settings", [BLOCKS, {"strategy": "no_shard"}], ids=["shards", "copies"])
def test_a_rank_that_sleeps_is_named_on_all_ranks_at_the_same_calls(settings: dict[str, Any]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[tuple[Straggler, ...]]:
        model = sharded_copy(seeded(sleepy), rank, world, **settings)
        return found_in(model, rank, 10, SLEEP_S if rank == 1 else 0.0, every=4, factor=2.0)

    answers = on_ranks(3, on_rank)
    # The first call begins a window of four, which the sixth reads; the tenth reads the second.
    first, second = answers[0][5], answers[0][9]
    for (slow,), times in ((first, 1), (second, 2)):
        assert (slow.rank, slow.host, slow.times) == (1, socket.gethostname(), times)
        assert slow.own_s >= SLEEP_S
        assert slow.median_s < SLEEP_S
    assert [bool(each) for each in answers[0]] == [call in (5, 9) for call in range(10)]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_ranks_that_are_slow_alike_are_none() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[tuple[Straggler, ...]]:
        model = sharded_copy(seeded(sleepy), rank, world, **BLOCKS)
        return found_in(model, rank, 10, SLEEP_S, every=8, factor=3.0)

    assert on_ranks(3, on_rank) == [[()] * 10] * 3


def sleep_on_one(rank: int) -> list[tuple[Straggler, ...]]:
    model = polyshard.shard(seeded(sleepy), polyshard.ShardConfig(timeout_s=20, **BLOCKS))
    return found_in(model, rank, 6, SLEEP_S if rank == 2 else 0.0, every=4, factor=2.0)


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_over_gloo() -> None:
    with RankPool(3) as pool:
        answers = pool.run(sleep_on_one)
    assert answers[0] == answers[1] == answers[2]
    assert [[slow.rank for slow in each] for each in answers[0]] == [[], [], [], [], [], [2]]
    slow = answers[0][5][0]
    assert slow.own_s >= SLEEP_S > slow.median_s


@pytest.mark.slow
def test_rank_0_logs_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(sleepy), rank, world, **BLOCKS)
        found_in(model, rank, 3, SLEEP_S if rank == 0 else 0.0, every=1, factor=2.0)

    with caplog.at_level(logging.WARNING, "polyshard"):
        on_ranks(2, on_rank)
    # Every call but the first judges what the one before it measured.
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith(f"Other ranks wait: rank 0 on '{socket.gethostname()}' takes 0.")
    assert lines[0].endswith(" s is the median")


def test_steps_without_a_forward_are_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[tuple[Straggler, ...]]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with polyshard.Stragglers(model, every=1) as stragglers:
            return [stragglers.step() for _ in range(5)]

    with caplog.at_level(logging.WARNING, "polyshard"):
        assert on_ranks(2, on_rank) == [[()] * 5] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "Stragglers saw no step: those that a CUDA graph replays cannot be measured."
    ]


@pytest.mark.slow
def test_measuring_changes_no_bit_and_ends_with_the_block() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, other = (sharded_copy(seeded(Net), rank, world, **BLOCKS) for _ in range(2))
        optimizers = adam(model), adam(other)
        with polyshard.Stragglers(model, every=2) as stragglers:
            for step in range(5):
                for each, optimizer in zip((model, other), optimizers, strict=True):
                    each(draw(4, 3, rank=rank + 10 * step)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                stragglers.step()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(local(mine), local(theirs))
        with pytest.raises(StateError, match=r"step\(\) was called outside of 'with polyshard.Stragglers\(model\)'"):
            stragglers.step()
        with stragglers:
            assert stragglers.step() == ()

    on_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every must be a number of steps, 1 or more, not 0."),
        ({"factor": 1.0}, "factor must be above 1, not 1.0."),
        ({"factor": float("nan")}, "factor must be above 1, not nan."),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        polyshard.Stragglers(nn.Linear(2, 2), **settings)
    assert str(caught.value) == words


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(StateError, match="Stragglers needs a sharded module"), polyshard.Stragglers(nn.Linear(2, 2)):
        pass
    model = seeded(Net)
    alone = polyshard.shard(model, polyshard.ShardConfig(strategy="no_shard", collectives="fake"))
    with polyshard.Stragglers(alone, every=1) as stragglers:
        with pytest.raises(StateError, match="entered twice"):
            stragglers.__enter__()
        for _ in range(3):
            alone(draw(4, 3)).sum().backward()
            assert stragglers.step() == ()
