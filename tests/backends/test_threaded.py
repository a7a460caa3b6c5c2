"""The threaded backend: N ranks as N threads of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import one_core
from polyshard.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    DeviceError,
    RankMismatchError,
    StateError,
    WorldSizeError,
)
from polyshard.interfaces import Collectives, PluginContext, ReduceOp
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_testing import CollectivesSuite

T = TypeVar("T")
CPU = PluginContext("threaded", torch.device("cpu"))


def join(world: ThreadedWorld, rank: int) -> ThreadedCollectives:
    return ThreadedCollectives(CPU, world, rank)


class TestConformance(CollectivesSuite):
    world_sizes = (1, 2, 3, 8)

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        def on_rank(rank: int, world: ThreadedWorld) -> T:
            return fn(join(world, rank))

        with one_core():
            return ThreadedWorld(world_size, timeout=10.0).run(on_rank, timeout=20.0)


def test_issuing_does_not_wait_for_the_others() -> None:
    issued = threading.Event()

    def on_rank(rank: int, world: ThreadedWorld) -> float:
        collectives = join(world, rank)
        if rank == 1:
            # Rank 0 gets here only if issuing returned while this rank had issued nothing.
            assert issued.wait(10.0)
        gathered, total = torch.zeros(2), torch.ones(1)
        works = [
            collectives.all_gather(gathered, torch.tensor([float(rank)])),
            collectives.all_reduce(total, op=ReduceOp.SUM),
        ]
        if rank == 0:
            issued.set()
        for work in reversed(works):
            work.wait()
        return total.item() + gathered[1].item()

    assert ThreadedWorld(2).run(on_rank) == [3.0, 3.0]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    addends=st.lists(st.floats(min_value=-1e6, max_value=1e6, width=32), min_size=2, max_size=4),
    delays=st.permutations(range(4)),
)
def test_sums_do_not_depend_on_the_order_of_arrival(addends: list[float], delays: list[int]) -> None:
    """Rank order, whoever comes last: compared with a loop over ranks in the same dtype."""
    world_size = len(addends)
    turns = [threading.Event() for _ in range(5)]
    turns[0].set()

    def on_rank(rank: int, world: ThreadedWorld) -> float:
        place = sorted(range(world_size), key=lambda r: delays[r]).index(rank)
        total = torch.tensor(addends[rank], dtype=torch.float32)
        collectives = join(world, rank)
        assert turns[place].wait(10.0)
        work = collectives.all_reduce(total, op=ReduceOp.SUM)
        turns[place + 1].set()
        work.wait()
        return total.item()

    expected = torch.tensor(addends[0], dtype=torch.float32)
    for addend in addends[1:]:
        expected = expected + torch.tensor(addend, dtype=torch.float32)
    assert ThreadedWorld(world_size).run(on_rank) == [expected.item()] * world_size


def test_results_written_by_another_thread_do_not_bump_versions() -> None:
    """Autograd would otherwise refuse parameters that are views of a gathered buffer."""

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[int, float]:
        out = torch.zeros(2)
        before = out._version
        join(world, rank).all_gather(out, torch.ones(1)).wait()
        return out._version - before, out.sum().item()

    assert ThreadedWorld(2).run(on_rank) == [(0, 2.0), (0, 2.0)]


@pytest.mark.parametrize(
    ("issue", "wanted"),
    [
        (
            lambda c: c.all_reduce(torch.zeros(2 + c.rank), op=ReduceOp.SUM).wait(),
            r"rank 0 wants all_reduce\(SUM\) of 2 torch.float32 elements; rank 1 wants all_reduce\(SUM\) of 3",
        ),
        (
            lambda c: c.broadcast(torch.zeros(2, dtype=(torch.float32, torch.float64)[c.rank]), 0).wait(),
            r"rank 0 wants broadcast\(from 0\) of 2 torch.float32 elements; rank 1 wants .* torch.float64",
        ),
        (
            lambda c: c.all_to_all(
                torch.zeros(2, dtype=(torch.float32, torch.int32)[c.rank]),
                [1, 1],
                torch.zeros(2, dtype=(torch.float32, torch.int32)[c.rank]),
                [1, 1],
            ).wait(),
            "rank 0 wants all_to_all of torch.float32 elements; rank 1 wants all_to_all of torch.int32 elements",
        ),
        (
            lambda c: c.barrier() if c.rank else c.all_gather_object(1),
            "rank 0 wants all_gather_object; rank 1 wants barrier",
        ),
        (
            lambda c: c.partition([[0, 1]] if c.rank else [[0], [1]]),
            r"rank 0 wants partition into \[\[0\], \[1\]\]; rank 1 wants partition into \[\[0, 1\]\]",
        ),
    ],
    ids=["sizes", "dtypes", "dtypes of an exchange", "operations", "partitions"],
)
def test_ranks_that_differ_all_raise(issue: Callable[[Collectives], object], wanted: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with pytest.raises(RankMismatchError, match=wanted):
            issue(join(world, rank))

    ThreadedWorld(2, timeout=5.0).run(on_rank)


def test_blocks_of_other_sizes_than_expected_fail_on_every_rank() -> None:
    out_splits = {0: [1, 2], 1: [4, 1]}

    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        out = torch.zeros(sum(out_splits[rank]))
        with pytest.raises(CollectiveAbortedError, match="rank 0 of the group sends 3 elements to rank 1, which"):
            join(world, rank).all_to_all(out, out_splits[rank], torch.ones(4 - rank), [[1, 3], [2, 1]][rank]).wait()
        return out.tolist()

    # Nothing arrived, of what would have fitted either.
    assert ThreadedWorld(2, timeout=5.0).run(on_rank) == [[0.0] * 3, [0.0] * 5]


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named_on_all_others_with_stacks() -> None:
    leave = threading.Event()

    def absent_in_a_loop() -> None:
        assert leave.wait(10.0)

    seen: list[str] = []

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        if rank == 1:
            absent_in_a_loop()
            return
        with pytest.raises(CollectiveTimeoutError, match=r"waiting for ranks \[1\]") as raised:
            join(world, rank).barrier()
        seen.append(str(raised.value))
        if len(seen) == 2:
            leave.set()

    ThreadedWorld(3, timeout=0.3).run(on_rank, timeout=10.0)
    assert len(seen) == 2
    assert all("rank 1:\n" in message and "in absent_in_a_loop" in message for message in seen)


@pytest.mark.slow
def test_a_rank_that_arrives_too_late_is_told_so() -> None:
    given_up = threading.Event()

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        if rank == 1:
            assert given_up.wait(10.0)
        with pytest.raises(CollectiveTimeoutError, match=rf"rank {rank}: barrier .* within 0.2 s"):
            join(world, rank).barrier()
        given_up.set()

    ThreadedWorld(2, timeout=0.2).run(on_rank, timeout=10.0)


@pytest.mark.slow
def test_the_contexts_timeout_counts_where_it_is_shorter() -> None:
    context = PluginContext("threaded", torch.device("cpu"), timeout=timedelta(seconds=0.2))

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"within 0.2 s"):
                ThreadedCollectives(context, world, rank).barrier()

    ThreadedWorld(2, timeout=60.0).run(on_rank, timeout=10.0)


def test_abort_wakes_the_others_and_says_why() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        collectives = join(world, rank)
        if rank == 0:
            world.abort("rank 0 gave up: the loss is not finite")
        with pytest.raises(CollectiveAbortedError, match="because rank 0 gave up: the loss is not finite"):
            collectives.barrier()

    world = ThreadedWorld(3)
    world.run(on_rank)
    with pytest.raises(StateError, match="make a new one"):
        world.run(on_rank)


def test_an_operation_that_fails_fails_on_every_rank() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        # Booleans have no quotient, which only shows when the operation is carried out.
        with pytest.raises(CollectiveAbortedError, match="failed: RuntimeError"):
            join(world, rank).all_reduce(torch.ones(2, dtype=torch.bool), op=ReduceOp.MEAN).wait()

    ThreadedWorld(2).run(on_rank)


def test_memory_of_a_rank_that_raised_is_not_written_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two gathers in one batch the first fails; its caller takes the memory back before the other rank comes."""
    raised = threading.Event()
    # Smaller ones than this would travel as one, by way of other memory.
    monkeypatch.setattr("polyshard.interfaces.collectives.PACKED_NBYTES", 0)

    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        collectives = join(world, rank)
        first, second = torch.zeros(2 + 2 * rank), torch.zeros(2)
        pairs = [(first, torch.ones(1 + rank)), (second, torch.ones(1))]
        if rank == 1:
            collectives.all_gather(*pairs.pop(0))
            assert raised.wait(10.0)
        with pytest.raises(RankMismatchError, match=r"rank 0 wants all_gather of 2 .*; rank 1 wants all_gather of 4"):
            collectives.all_gather_many(pairs).wait()
        second.fill_(7.0)
        raised.set()
        collectives.barrier()
        return second.tolist()

    assert ThreadedWorld(2, timeout=5.0).run(on_rank) == [[7.0, 7.0], [7.0, 7.0]]


#: Every allocation on a rank is due for collection, and every collection gives the other rank its turn. In a process of
#: its own: a deadlock that keeps the interpreter lock ends with its process only.
COLLECTS_ON_RANKS = """
import faulthandler, gc, threading, time
import torch
from polyshard_backends.threaded import ThreadedWorld

faulthandler.dump_traceback_later(30.0, exit=True)
ended, together = threading.Event(), threading.Barrier(2)

def collects(phase, info):
    if threading.current_thread().name.startswith("rank"):
        time.sleep(0.01)

def reads_the_generator(rank, world):
    if rank == 0:
        states = [torch.get_rng_state() for _ in range(8)]
        ended.set()
    while not ended.is_set():
        torch.get_rng_state()

def asks_for_the_first_time(rank, world):
    weight = torch.ones(1, requires_grad=True)
    accumulate = torch.autograd.graph.get_gradient_edge(weight).node

    def asks(gradient):
        together.wait()
        assert torch._C._will_engine_execute_node(accumulate)

    weight.register_hook(asks)
    weight.sum().backward()

gc.callbacks.append(collects)
gc.set_threshold(1)
ThreadedWorld(2).run(%s)
gc.callbacks.remove(collects)
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", ["reads_the_generator", "asks_for_the_first_time"])
def test_a_garbage_collection_inside_torch_does_not_stop_all_ranks(body: str) -> None:
    """One body meets a mutex of torch, the other the guard of a static variable."""
    code = COLLECTS_ON_RANKS % body
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "message", "construct"),
    [
        (WorldSizeError, "give at least 1", lambda: ThreadedWorld(0)),
        (ConfigError, "positive timeout", lambda: ThreadedWorld(2, timeout=0.0)),
        (WorldSizeError, "give 0 to 1", lambda: ThreadedCollectives(CPU, ThreadedWorld(2), 2)),
        (ConfigError, "give a ThreadedWorld", lambda: ThreadedCollectives(CPU, 2, 0)),  # type: ignore[arg-type]
        (
            DeviceError,
            "was given meta",
            lambda: ThreadedCollectives(PluginContext("threaded", torch.device("meta")), ThreadedWorld(2), 0),
        ),
        (
            CollectiveError,
            "the whole must have 4",
            lambda: ThreadedCollectives(CPU, ThreadedWorld(2), 0).all_gather(torch.zeros(3), torch.zeros(2)),
        ),
        (
            CollectiveError,
            "must be contiguous",
            lambda: ThreadedCollectives(CPU, ThreadedWorld(2), 0).all_reduce(torch.zeros(3, 2).t(), op=ReduceOp.SUM),
        ),
    ],
    ids=["no-ranks", "no-time", "rank", "world", "device", "sizes", "strides"],
)
def test_bad_input_is_refused_before_any_exchange(
    error: type[Exception], message: str, construct: Callable[[], object]
) -> None:
    with pytest.raises(error, match=message):
        construct()
