"""Gradients summed over microbatches before one reduction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_parity,
    draw,
    is_sharded,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    units_of,
    whole,
)
from polyshard import ShardConfig
from polyshard.errors import CollectiveError, ConfigError, StateError
from polyshard.interfaces import Collectives, CollectivesDecorator, PluginContext, ReduceOp, Work
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from torch import nn

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_step_over_gradients_that_nobody_reduced_is_refused(strategy: str) -> None:
    reference = nn.Linear(4, 1, bias=False)
    nn.init.ones_(reference.weight)

    def body(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(reference, rank, world, strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.full((2, 4), 1.0 + rank)
        with polyshard.no_sync(model):
            model(x).sum().backward()
        with pytest.raises(StateError, match=r"SGD was to update 'weight' .* Leave no_sync\(\) for the last backward"):
            optimizer.step()
        # Two backwards on each of two ranks, whose mean of inputs is 1.5, over two samples: one in a closure.

        def last() -> torch.Tensor:
            loss: torch.Tensor = model(x).sum()
            loss.backward()
            return loss

        optimizer.step(last)
        with polyshard.unsharded(model):
            torch.testing.assert_close(model.weight, torch.full((1, 4), 1 - 0.5 * 2 * 2 * 1.5))

    on_ranks(2, body)


def accumulating(second: Callable[[nn.Module, int, int], list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """A whole microbatch without reduction, then ``second`` with it."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        with polyshard.no_sync(model) if is_sharded(model) else nullcontext():
            first = square_step(model, turn, rank)
        return [*first, *second(model, turn, rank)]

    return step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_waiting_gradients_are_reduced_by_a_backward_through_a_child_alone(strategy: str) -> None:
    child_alone = stepping(lambda model, x, turn, rank: model.blocks[1](x).square().mean(), 4, 5, grad=False)

    settings = {"policy": units_of(Block), "strategy": strategy}
    assert_parity(seeded(Net), accumulating(child_alone), world_size=2, settings=settings)


@pytest.mark.parametrize(("accumulating", "sums"), [(polyshard.no_all_reduce, 1), (lambda _: nullcontext(), 4)])
def test_replicas_send_one_sum_a_step(accumulating: Callable[[nn.Module], Any], sums: int) -> None:
    groups: list[FakeCollectives] = []

    class Recorded(FakeCollectives):
        def partition(self, rank_lists: Sequence[Sequence[int]]) -> FakeCollectives:
            groups.append(super().partition(rank_lists))
            return groups[-1]

    ranks = Recorded(PluginContext("fake", torch.device("cpu")), 0, 8)
    config = polyshard.ShardConfig(collectives=ranks, strategy="hybrid_shard", shard_size=2, policy=units_of(nn.Linear))
    model = polyshard.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), config)
    whole = 4 * (64 * 64 + 64)
    for group in groups:
        group.calls.clear()
    with accumulating(model):
        for _ in range(3):
            model(torch.ones(4, 64)).sum().backward()
    model(torch.ones(4, 64)).sum().backward()
    sent = [call.numel for group in groups for call in group.calls if call.operation == "all_reduce"]
    # Each rank adds up its half of every unit with three others; up to 128 elements of each are padding.
    assert sums * whole / 2 <= sum(sent) <= sums * (whole / 2 + 4 * 128)
    scattered = [call.numel for group in groups for call in group.calls if call.operation == "reduce_scatter"]
    assert 4 * whole <= sum(scattered) <= 4 * (whole + 8 * 128)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_tokens_train_on_the_mean_over_all_tokens() -> None:
    counts = [(4, 2), (0, 1), (3, 0)]
    strategies: dict[str, dict[str, Any]] = {each: {"strategy": each} for each in STRATEGIES}

    def loss(model: nn.Module, rank: int, part: int) -> torch.Tensor:
        summed: torch.Tensor = model(draw(4, 3, turn=part, rank=rank))[: counts[rank][part]].square().sum()
        return summed

    whole = seeded(Net)
    (sum(loss(whole, rank, part) for rank in range(3) for part in range(2)) / 10).backward()
    torch.optim.SGD(whole.parameters(), lr=1.0).step()

    def on_rank(rank: int, world: ThreadedWorld) -> list[tuple[float, dict[str, torch.Tensor]]]:
        found = []
        for settings in strategies.values():
            model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), **settings)
            with pytest.raises(ConfigError, match=r"shape \(2,\).*count\.sum"):
                polyshard.token_divisor(model, torch.tensor(counts[rank]))
            count = sum(counts[rank])
            divisor = polyshard.token_divisor(model, torch.tensor(count) if rank else count)
            for part in range(2):
                with polyshard.no_sync(model) if part == 0 else nullcontext():
                    (loss(model, rank, part) / divisor).backward()
            torch.optim.SGD(model.parameters(), lr=1.0).step()
            none = polyshard.token_divisor(model, 0).item()
            with polyshard.unsharded(model):
                found.append((none, {name: each.detach().clone() for name, each in model.named_parameters()}))
        return found

    for of_rank in on_ranks(3, on_rank):
        for none, parameters in of_rank:
            assert none == pytest.approx(1 / 3)
            for name, each in whole.named_parameters():
                torch.testing.assert_close(parameters[name], each.detach(), rtol=0, atol=1e-12, msg=name)


# Gradients averaged over other jobs (``Collectives.replicas``): against one plain model that sees all batches.

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
