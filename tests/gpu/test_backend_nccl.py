"""The NCCL backend, one process for each of at most two GPUs; its CPU twin is ``test_backend_gloo``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from polyshard.errors import CollectiveError, WorldSizeError
from polyshard.interfaces import BufferRole, Collectives, PluginContext, ReduceOp
from polyshard_backends.nccl import NcclCollectives
from polyshard_testing import CollectivesSuite
from polyshard_testing.collectives_checks import check_close, check_overlap
from processes import KeptRanks, device_of, gpu_ranks

pytestmark = pytest.mark.gpu

#: Bytes that no backend takes for few.
LARGE = 1 << 30

T = TypeVar("T")

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
#: Older versions of torch number the ranks of a group in ascending order only.
ANY_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def context(rank: int) -> PluginContext:
    return PluginContext("nccl", device_of(rank), timeout=timedelta(seconds=30))


#: In a rank's process: one instance for all tests, since making its communicators takes seconds.
KEPT: dict[bool, NcclCollectives] = {}


def on_nccl(rank: int, fn: Callable[..., T], registered: bool, *args: Any) -> T:
    if registered not in KEPT:
        KEPT[registered] = NcclCollectives(context(rank), registered=registered, smallest_mib=0)
    with warnings.catch_warnings():
        if WORLD_SIZE == 1:
            # A device alone may have no multicast, and NCCL then no memory to register: gathers use plain memory.
            warnings.filterwarnings("ignore", message=".*registering it failed")
        result = fn(KEPT[registered], *args)
    torch.cuda.synchronize()
    return result


def check_close_alone(collectives: Collectives) -> None:
    """Close an instance that no other test uses."""
    check_close(NcclCollectives(context(collectives.device.index)))


def run(fn: Callable[..., T], *args: Any, registered: bool = False) -> list[T]:
    return RANKS.run(WORLD_SIZE, on_nccl, fn, registered, *args, timeout=60.0)


class TestConformance(CollectivesSuite):
    world_sizes = (WORLD_SIZE,)

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        return run(fn)

    def test_close_twice(self, world_size: int) -> None:
        run(check_close_alone)

    def test_partition_numbers_ranks_by_their_list(self, world_size: int) -> None:
        if ANY_ORDER or world_size == 1:
            super().test_partition_numbers_ranks_by_their_list(world_size)
        else:
            with pytest.raises(WorldSizeError, match="ascending order"):
                super().test_partition_numbers_ranks_by_their_list(world_size)


class TestConformanceRegistered(CollectivesSuite):
    """Gather buffers in registered memory."""

    world_sizes = (WORLD_SIZE,)

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        return run(fn, registered=True)

    # Neither depends on whose memory is gathered.
    test_close_twice = None
    test_partition_numbers_ranks_by_their_list = None


def captured_step(collectives: Collectives) -> tuple[list[float], list[float]]:
    """A gather and a widening reduction on side streams, captured once and replayed on changed inputs."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = 1024
    with collectives.allocation(BufferRole.GATHER, LARGE):
        out = torch.empty(world_size * n, device=device)
    out.zero_()
    own = out[rank * n : (rank + 1) * n]
    master = torch.zeros(n, device=device)
    full = torch.zeros(world_size * n, dtype=torch.bfloat16, device=device)
    gradient = torch.zeros(n, device=device)
    nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, full.numel(), full.dtype, gradient.dtype)
    scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
    gathers, reductions = torch.cuda.Stream(), torch.cuda.Stream()

    def step() -> None:
        compute = torch.cuda.current_stream()
        gathers.wait_stream(compute)
        reductions.wait_stream(compute)
        with torch.cuda.stream(gathers):
            own.copy_(master)
            gather = collectives.all_gather(out, own)
        with torch.cuda.stream(reductions):
            reduction = collectives.reduce_scatter(gradient, full, op=ReduceOp.MEAN, scratch=scratch)
        gather.wait()
        reduction.wait()
        compute.wait_stream(gathers)
        compute.wait_stream(reductions)

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    master.fill_(float(rank + 1))
    full.fill_(float(rank + 3))
    graph.replay()
    torch.cuda.synchronize()
    return out.view(world_size, n).unique(dim=1).flatten().tolist(), gradient.unique().tolist()


@pytest.mark.parametrize("registered", [False, True])
def test_operations_can_be_captured(registered: bool) -> None:
    mean = sum(rank + 3.0 for rank in range(WORLD_SIZE)) / WORLD_SIZE
    gathered = [rank + 1.0 for rank in range(WORLD_SIZE)]
    assert run(captured_step, registered=registered) == [(gathered, [mean])] * WORLD_SIZE


def captured_exchange(collectives: Collectives) -> tuple[list[float], list[float]]:
    """Uneven blocks and a gather on side streams, captured once and replayed on changed inputs."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    in_splits = [100 * rank + 10 * target for target in range(world_size)]
    out_splits = [100 * source + 10 * rank for source in range(world_size)]
    # A dtype that travels as its bytes.
    sent = torch.zeros(sum(in_splits), dtype=torch.int16, device=device)
    received = torch.zeros(sum(out_splits), dtype=torch.int16, device=device)
    shard = torch.zeros(1000, device=device)
    gathered = torch.zeros(world_size * 1000, device=device)
    exchanges, gathers = torch.cuda.Stream(), torch.cuda.Stream()

    def step() -> None:
        compute = torch.cuda.current_stream()
        for stream in (exchanges, gathers):
            stream.wait_stream(compute)
        with torch.cuda.stream(exchanges):
            exchange = collectives.all_to_all(received, out_splits, sent, in_splits)
        with torch.cuda.stream(gathers):
            gather = collectives.all_gather(gathered, shard)
        exchange.wait()
        gather.wait()
        received.mul_(2)

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for target, part in enumerate(sent.split(in_splits)):
        part.fill_(100 * rank + target)
    shard.fill_(float(rank + 1))
    graph.replay()
    torch.cuda.synchronize()
    return received.tolist(), gathered.view(world_size, 1000).unique(dim=1).flatten().tolist()


def test_exchanges_can_be_captured() -> None:
    for rank, (received, gathered) in enumerate(run(captured_exchange)):
        expected = []
        for source in range(WORLD_SIZE):
            expected += [2 * (100 * source + rank)] * (100 * source + 10 * rank)
        assert received == expected
        assert gathered == [other + 1.0 for other in range(WORLD_SIZE)]


def reduce_large(collectives: Collectives, numels: Sequence[int], travels: torch.dtype) -> float:
    """Largest error of reductions into fp32, one after the other, against fp64, as a share of the largest value."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    worst = 0.0
    for turn, n in enumerate(numels):
        sent = []
        for sender in range(world_size):
            generator = torch.Generator(device).manual_seed(100 * turn + sender)
            sent.append(torch.randn(world_size * n, generator=generator, device=device).to(travels))
        out = torch.empty(n, device=device)
        collectives.reduce_scatter(out, sent[rank].clone(), op=ReduceOp.MEAN).wait()
        exact = torch.stack([whole[rank * n : (rank + 1) * n].double() for whole in sent]).mean(0)
        worst = max(worst, ((out.double() - exact).abs().max() / exact.abs().max()).item())
    return worst


#: Elements from which on a kernel of our own takes the mean; it is kept for sizes that come back.
LONG = 1 << 22


@pytest.mark.parametrize("travels", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numels", [(1 << 16,), (LONG, LONG, LONG + 8, LONG, LONG + 3, LONG + 3)], ids=len)
def test_widening_reduction_is_as_exact_as_fp32(numels: Sequence[int], travels: torch.dtype) -> None:
    assert max(run(reduce_large, numels, travels)) < 1e-6


def misused(collectives: Collectives) -> list[str]:
    """What the backend says of tensors that do not fit; it must work on afterwards."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    said = []
    for numel, out_dtype in ((world_size + 1, torch.float32), (world_size, torch.float64)):
        with pytest.raises(CollectiveError) as raised:
            collectives.all_gather(torch.zeros(numel, dtype=out_dtype, device=device), torch.zeros(1, device=device))
        said.append(str(raised.value))
    for travels in (torch.float32, torch.bfloat16):
        full = torch.zeros(2 * world_size + 1, dtype=travels, device=device)
        with pytest.raises(CollectiveError) as raised:
            collectives.reduce_scatter(torch.zeros(2, device=device), full, op=ReduceOp.MEAN)
        said.append(str(raised.value))
    out = torch.zeros(world_size, device=device)
    collectives.all_gather(out, torch.full((1,), float(rank), device=device)).wait()
    assert out.tolist() == list(range(world_size))
    return said


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    for rank, said in enumerate(run(misused)):
        assert f"all_gather on rank {rank}: the whole has {WORLD_SIZE + 1} elements" in said[0]
        assert "cast before the call" in said[1]
        assert all(f"the whole must have {2 * WORLD_SIZE}" in text for text in said[2:])


def with_one_communicator(collectives: Collectives, wait_order: tuple[int, ...]) -> int:
    """Overlapping operations on one communicator; how many groups it made for itself."""
    before = len(dist.distributed_c10d._world.pg_map)
    one = NcclCollectives(context(collectives.device.index), communicators=1)
    check_overlap(one, [wait_order])
    made = len(dist.distributed_c10d._world.pg_map) - before
    one.close()
    return made


@pytest.mark.parametrize("wait_order", [(0, 1, 2, 3), (3, 1, 2, 0)], ids=str)
def test_gathers_and_reductions_may_share_a_communicator(wait_order: tuple[int, ...]) -> None:
    assert run(with_one_communicator, wait_order) == [0] * WORLD_SIZE
