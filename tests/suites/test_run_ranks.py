"""Ranks for the tests of plugins: threads and processes, and how each way of failing ends."""

from __future__ import annotations

import dataclasses
import multiprocessing.forkserver
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from polyshard.errors import CollectiveTimeoutError, ConfigError, RankFailedError, WorldSizeError
from polyshard.interfaces import Collectives, Group, PolicyContext, ReduceOp, UnitPlan
from polyshard_policies.module_class import Always
from polyshard_testing import CollectivesSuite, KeptProcesses, Rank, RankProcesses, plugin_context, run_ranks
from polyshard_testing import plugin_context as context_of
from polyshard_testing.plugin import collectives_noted
from polyshard_testing.training import Training
from processes import forking_context
from torch import nn


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptProcesses]:
    # Other files' processes want more preloaded than these do, and the server is started once.
    forking_context()
    multiprocessing.forkserver.ensure_running()
    processes = KeptProcesses()
    yield processes
    processes.close()


def gradients(rank: Rank) -> tuple[int, list[float], list[float]]:
    """Sum of ``weight`` times an input that is ``rank + 1`` everywhere, averaged over ranks."""
    with rank.lock:
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)
    whole = model.weight.detach().flatten().tolist()
    polyshard.shard(model, polyshard.ShardConfig(collectives=rank.collectives))
    model(torch.full((1, 4), float(rank.rank + 1))).sum().backward()
    assert model.weight.grad is not None
    with polyshard.unsharded(model):
        assert model.weight.detach().flatten().tolist() == whole
    gradient: Any = model.weight.grad
    return rank.world_size, whole, gradient.to_local().flatten().tolist()


def check_gradients(answers: list[tuple[int, list[float], list[float]]]) -> None:
    """Of inputs 1 and 2 the mean is 1.5, which is every element's gradient."""
    assert [answer[0] for answer in answers] == [2, 2]
    assert answers[0][1] == answers[1][1]
    assert answers[0][2] + answers[1][2] == [1.5] * 12


def test_threads_train_a_model_that_they_share() -> None:
    check_gradients(run_ranks(2, gradients))


@pytest.mark.slow
def test_processes_train_a_model_that_they_share(kept: KeptProcesses) -> None:
    check_gradients(kept.of(2).run(gradients))
    # The same processes once more, in the group that they have joined.
    assert kept.of(2).run(place) == [(0, 2, "cpu", 0), (1, 2, "cpu", 1)]


def place(rank: Rank) -> tuple[int, int, str, int]:
    return rank.rank, rank.world_size, rank.device.type, dist.get_rank()


def test_threads_run_at_once_and_take_any_function() -> None:
    all_there = threading.Barrier(3, timeout=10.0)
    assert run_ranks(3, lambda rank: (all_there.wait() in range(3), rank.rank)) == [(True, 0), (True, 1), (True, 2)]


def raises_on_one(rank: Rank) -> None:
    if rank.rank == 1:
        raise KeyError("lost")
    time.sleep(60)


def test_what_one_thread_raises_is_raised_here_and_the_others_end() -> None:
    with pytest.raises(KeyError, match="lost") as raised:
        run_ranks(2, exchanging)
    assert raised.value.__notes__ == ["raised on rank 1 of a threaded world of 2"]


def exchanging(rank: Rank) -> None:
    collectives = context_of().construct(Group.COLLECTIVES, rank.collectives)
    if rank.rank == 1:
        raise KeyError("lost")
    collectives.all_reduce(torch.ones(1), op=ReduceOp.SUM).wait()


@pytest.mark.slow
def test_what_one_process_raises_is_raised_here_with_its_traceback(kept: KeptProcesses) -> None:
    processes = kept.of(2)
    with pytest.raises(KeyError, match="lost") as raised:
        processes.run(raises_on_one, timeout_s=30.0)
    (note,) = raised.value.__notes__
    assert note.startswith("raised on rank 1 of 2 processes\nTraceback")
    assert "in raises_on_one" in note
    # Rank 0 was ended in its sleep, and what comes next gets new ones.
    assert processes.closed
    assert kept.of(2) is not processes


def dies(rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(7)
    dist.barrier()


def leaves(rank: Rank) -> None:
    raise SystemExit("no licence")


def unsendable(rank: Rank) -> threading.Lock:
    return threading.Lock()


@pytest.mark.slow
def test_a_process_that_dies_or_cannot_answer_is_named(kept: KeptProcesses) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 died with exit code 7"):
        kept.of(2).run(dies, timeout_s=30.0)
    with pytest.raises(RankFailedError, match="rank 0 raised SystemExit: no licence"):
        kept.of(1).run(leaves)
    with pytest.raises(RankFailedError, match=r"rank 0 returned, a lock, cannot be sent.*Return numbers"):
        kept.of(1).run(unsendable)


def hangs(rank: Rank) -> None:
    if rank.rank == 1:
        sleeping()
    context_of().construct(Group.COLLECTIVES, rank.collectives).barrier()


def sleeping() -> None:
    time.sleep(1.5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_hang_ends_with_the_stacks_of_all_ranks(kept: KeptProcesses, backend: str) -> None:
    def run() -> None:
        if backend == "threads":
            run_ranks(2, hangs, timeout_s=0.5)
        else:
            kept.of(2).run(hangs, timeout_s=0.5)

    with pytest.raises(CollectiveTimeoutError, match=r"had not returned after 0\.5 s") as raised:
        run()
    assert "in sleeping" in str(raised.value)
    assert "in barrier" in str(raised.value)


@pytest.mark.slow
def test_what_cannot_be_sent_is_refused_with_what_can(kept: KeptProcesses) -> None:
    with pytest.raises(ConfigError, match=r"Take a function that stands in a module, or functools.partial"):
        kept.of(2).run(lambda rank: rank.rank)
    # Nothing was sent: they work on.
    assert [each[0] for each in kept.of(2).run(place)] == [0, 1]


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(WorldSizeError, match="at least 1"):
        run_ranks(0, gradients)
    with pytest.raises(WorldSizeError, match="at least 1"):
        RankProcesses(0)
    with pytest.raises(ConfigError, match="positive timeout_s"):
        run_ranks(2, gradients, timeout_s=0)
    with pytest.raises(ConfigError, match='"threads" or "processes", not \'fork\''):
        run_ranks(2, gradients, backend="fork")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='compute on the CPU, not on cuda; take "processes"'):
        run_ranks(2, gradients, device_type="cuda")


@pytest.mark.slow
class TestAgain(CollectivesSuite):
    """Collectives made of those that work between the ranks."""

    world_sizes = (2,)

    def make(self, rank: Rank) -> Collectives:  # type: ignore[override]
        return context_of().construct(Group.COLLECTIVES, rank.collectives)

    def make_impatient(self, rank: Rank, timeout: timedelta) -> Collectives:
        context = dataclasses.replace(context_of(), timeout=timeout)
        return context.construct(Group.COLLECTIVES, rank.collectives)


@pytest.mark.nightly
class TestBetweenProcesses(TestAgain):
    ranks = "processes"


def test_a_suite_without_a_backend_says_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match=r"CollectivesSuite must override make\(rank\), or run_ranks"):
        CollectivesSuite().test_close_twice(1)


# What the suites compare a plugin with: steps over two ranks, or pretended ones where threads share no device.


class Draws(Always):
    """Draws random numbers on one rank, as long as the other may be building its model."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        for _ in range(50):
            torch.rand(1)
            time.sleep(0.001)
        return super().plan(root, context)


def slowly_built() -> nn.Module:
    parts = []
    for _ in range(20):
        parts.append(nn.Linear(6, 6))
        time.sleep(0.001)
    return nn.Sequential(nn.Embedding(10, 6), *parts)


@pytest.mark.slow
def test_a_plugin_that_draws_random_numbers_changes_no_other_ranks_model() -> None:
    training = Training(slowly_built)
    sharded = training.sharded(lambda: {"policy": Draws(plugin_context())})
    sharded.check(training.reference(), 1e-4)


def test_other_random_numbers_are_as_they_were() -> None:
    state = torch.get_rng_state()
    Training().reference()
    Training().scores(dict)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_process_group_of_one_leaves_nothing_behind() -> None:
    printing = sys.excepthook
    with collectives_noted() as issued:
        dist.all_reduce(torch.zeros(1))
    assert issued == ["c10d::allreduce_"]
    assert not dist.is_initialized()
    assert sys.excepthook is printing
