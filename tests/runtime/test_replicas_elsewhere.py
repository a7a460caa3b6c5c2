"""Gradients averaged over other jobs (``Collectives.replicas``): against one plain model that sees all batches."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, on_ranks, seeded, units_of, whole
from polyshard import ShardConfig
from polyshard.errors import CollectiveError, ConfigError
from polyshard.interfaces import Collectives, CollectivesDecorator, PluginContext, ReduceOp, Work
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld

CPU = torch.device("cpu")


class Elsewhere(CollectivesDecorator):
    """Means alone, over the ranks of ``peers``; whoever asks for anything else counts ranks that may go."""

    api_version = 1
    world_size, rank = 1, 0

    def __init__(self, peers: Collectives) -> None:
        super().__init__(peers)
        self.calls = 0

    def around(self, inner: Collectives) -> Collectives:
        raise CollectiveError("nobody divides other jobs")

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        assert op is ReduceOp.MEAN
        self.calls += 1
        return super().all_reduce(tensor, op=op)


class OfOneJob(CollectivesDecorator):
    """The ranks of a job, with those of other jobs behind them."""

    api_version = 1

    def __init__(self, job: Collectives, elsewhere: Elsewhere) -> None:
        super().__init__(job)
        self.elsewhere = elsewhere

    def around(self, inner: Collectives) -> Collectives:
        return OfOneJob(inner, self.elsewhere)

    @property
    def replicas(self) -> Collectives:
        return self.elsewhere


def in_jobs(rank: int, world: ThreadedWorld, size: int) -> OfOneJob:
    """The collectives of this rank's job of ``size`` ranks."""
    everyone = ThreadedCollectives(PluginContext("threaded", CPU), world, rank)
    jobs = world.world_size // size
    mine = everyone.partition([list(range(job * size, (job + 1) * size)) for job in range(jobs)])
    peers = everyone.partition([list(range(place, world.world_size, size)) for place in range(size)])
    return OfOneJob(mine, Elsewhere(peers))


def batch(turn: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * turn + rank), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "size", "strategy"),
    [(4, 2, "full_shard"), (6, 2, "full_shard"), (6, 3, "shard_grad_op"), (3, 1, "no_shard")],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_jobs_train_as_one_model_that_sees_all_batches(ranks: int, size: int, strategy: str, microbatches: int) -> None:
    model = seeded(Net).double()
    expected = copy.deepcopy(model)
    optimizer = adam(expected)
    norms = []
    for turn in range(3):
        for part in range(microbatches):
            for rank in range(ranks):
                loss = expected(batch(turn * microbatches + part, rank)).square().mean()
                (loss / (ranks * microbatches)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[dict[str, torch.Tensor], list[float], int]:
        collectives = in_jobs(rank, world, size)
        config = ShardConfig(collectives=collectives, strategy=strategy, policy=units_of(Block))
        mine = polyshard.shard(copy.deepcopy(model), config)
        optimizer = adam(mine)
        norms = []
        for turn in range(3):
            for part in range(microbatches):
                waits = part < microbatches - 1
                with polyshard.no_sync(mine) if waits else nullcontext():
                    (mine(batch(turn * microbatches + part, rank)).square().mean() / microbatches).backward()
            norms.append(float(polyshard.clip_grad_norm_(mine, 0.05)))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in whole(mine).items()}, norms, collectives.elsewhere.calls

    for state, found, calls in on_ranks(ranks, on_rank):
        assert found == pytest.approx(norms, rel=1e-12)
        assert calls, "nothing was averaged over the jobs"
        for name, parameter in expected.named_parameters():
            assert (state[name] - parameter).abs().max() < 1e-12, name


@pytest.mark.parametrize("settings", [{"strategy": "no_shard"}, {"strategy": "hybrid_shard", "shard_size": 2}])
def test_replicas_inside_of_a_job_are_refused_beside_those_elsewhere(settings: dict[str, Any]) -> None:
    fake = FakeCollectives(PluginContext("fake", CPU), rank=0, world_size=4)
    collectives = OfOneJob(fake, Elsewhere(fake))
    with pytest.raises(ConfigError, match=r"there are two kinds of replicas\. Choose strategy 'full_shard'"):
        polyshard.shard(seeded(Net), ShardConfig(collectives=collectives, **settings))
