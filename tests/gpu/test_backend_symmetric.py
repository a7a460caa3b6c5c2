"""Gathers by copy engines, one process for each of at most four GPUs; its CPU twin has the same name."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import polyshard
import pytest
import torch
import torch.distributed as dist
from polyshard.errors import WorldSizeError
from polyshard.interfaces import BufferRole, Collectives, PluginContext, ReduceOp
from polyshard_backends.nccl import NcclCollectives
from polyshard_backends.symmetric import SymmetricCollectives
from polyshard_testing import CollectivesSuite
from polyshard_testing.collectives_checks import check_close
from processes import KeptRanks
from torch import nn

pytestmark = pytest.mark.gpu

#: Bytes that no backend takes for few.
LARGE = 1 << 30

T = TypeVar("T")

WORLD_SIZE = max(1, min(torch.cuda.device_count(), 4))
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)
#: Older versions of torch number the ranks of a group in ascending order only.
ANY_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
needs_two = pytest.mark.skipif(WORLD_SIZE < 2, reason="one rank gathers nothing")


def context(rank: int) -> PluginContext:
    return PluginContext("symmetric", torch.device("cuda", rank), timeout=timedelta(seconds=30))


#: In a rank's process: one instance for all tests, since mapping memory takes seconds.
KEPT: list[SymmetricCollectives] = []


def on_symmetric(rank: int, fn: Callable[..., T], *args: Any) -> T:
    if not KEPT:
        KEPT.append(SymmetricCollectives(context(rank), smallest_mib=0))
    with warnings.catch_warnings():
        if WORLD_SIZE == 1:
            # A device alone may have no multicast, and NCCL then no memory to register: gathers use plain memory.
            warnings.filterwarnings("ignore", message=".*registering it failed")
        result = fn(KEPT[0], *args)
    torch.cuda.synchronize()
    return result


def check_close_alone(collectives: Collectives) -> None:
    """Close an instance that no other test uses, and that has gathered."""
    alone = SymmetricCollectives(context(collectives.device.index), smallest_mib=0)
    gather_in_turns(alone, 2)
    check_close(alone)


class TestConformance(CollectivesSuite):
    world_sizes = (WORLD_SIZE,)

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        return run(on_symmetric, fn)

    def test_close_twice(self, world_size: int) -> None:
        run(on_symmetric, check_close_alone)

    def test_partition_numbers_ranks_by_their_list(self, world_size: int) -> None:
        if ANY_ORDER or world_size == 1:
            super().test_partition_numbers_ranks_by_their_list(world_size)
        else:
            with pytest.raises(WorldSizeError, match="ascending order"):
                super().test_partition_numbers_ranks_by_their_list(world_size)


def sent(rank: int, turn: int, n: int, device: torch.device) -> torch.Tensor:
    positions = torch.arange(n, device=device, dtype=torch.int32)
    return ((positions * 7 + rank * 31 + turn * 101) % 251).to(torch.bfloat16)


def gather_in_turns(collectives: Collectives, turns: int) -> list[int]:
    """Elements that are not what a rank sent, for each turn; two buffers, released and taken again, and no pause."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    n = (1 << 20) + 3
    buffers: list[torch.Tensor] = []
    for _ in range(2):
        with collectives.allocation(BufferRole.GATHER, LARGE):
            buffers.append(torch.empty(world_size * n, dtype=torch.bfloat16, device=device))
    kept = []
    nbytes = buffers[0].untyped_storage().nbytes()
    for turn in range(turns):
        out = buffers[turn % 2]
        storage = out.untyped_storage()
        storage.resize_(0)
        with collectives.allocation(BufferRole.GATHER, LARGE):
            storage.resize_(nbytes)
        own = out.narrow(0, rank * n, n).copy_(sent(rank, turn, n, device))
        collectives.all_gather(out, own).wait()
        kept.append(out.clone())
    wrong = []
    for turn, got in enumerate(kept):
        expected = torch.cat([sent(each, turn, n, device) for each in range(world_size)])
        wrong.append(int((got != expected).sum()))
    return wrong


def test_gathers_without_a_pause_are_right() -> None:
    assert run(on_symmetric, gather_in_turns, 12) == [[0] * 12] * WORLD_SIZE


def reduce_in_turns(collectives: Collectives, turns: int) -> list[int]:
    """Elements that are not what NCCL makes of the same, for each turn; two buffers, taken in turns, and no pause."""
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    plain = NcclCollectives(context(device.index), communicators=1)
    n = (1 << 20) + 64
    # Memory is shared at the first gather.
    gather_in_turns(collectives, 1)
    buffers: list[torch.Tensor] = []
    for _ in range(2):
        with collectives.allocation(BufferRole.REDUCE, LARGE):
            buffers.append(torch.empty(world_size * n, dtype=torch.bfloat16, device=device))
    kept, expected = [], []
    for turn in range(turns):
        full = buffers[turn % 2]
        full.copy_(sent(rank, turn, world_size * n, device))
        usual = full.clone()
        for results, backend, source in ((kept, collectives, full), (expected, plain, usual)):
            results.append(torch.empty(n, dtype=torch.float32, device=device))
            backend.reduce_scatter(results[-1], source, op=ReduceOp.MEAN).wait()
    torch.cuda.synchronize()
    return [int((one != other).sum()) for one, other in zip(kept, expected, strict=True)]


def test_reductions_without_a_pause_are_nccls_to_the_bit() -> None:
    assert run(on_symmetric, reduce_in_turns, 12) == [[0] * 12] * WORLD_SIZE


def gather_in_new_memory(collectives: Collectives) -> list[int]:
    """Elements that are not what a rank sent, for buffers that no earlier one was as large as, on a side stream.

    The default stream is busy, so that whatever is queued there comes late.
    """
    world_size, rank, device = collectives.world_size, collectives.rank, collectives.device
    wrong = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for mebibytes in (192, 256, 320, 384):
            n = (mebibytes << 20) // world_size
            source = torch.full((n,), 1 + rank, dtype=torch.uint8, device=device)
            with torch.cuda.stream(torch.cuda.default_stream(device)):
                torch.cuda._sleep(100_000_000)
            with collectives.allocation(BufferRole.GATHER, LARGE):
                out = torch.empty(world_size * n, dtype=torch.uint8, device=device)
            own = out.narrow(0, rank * n, n).copy_(source)
            collectives.all_gather(out, own).wait()
            expected = torch.arange(1, 1 + world_size, dtype=torch.uint8, device=device).repeat_interleave(n)
            wrong.append(int((out != expected).sum()))
    return wrong


@needs_two
def test_new_memory_is_zeroed_before_it_is_written() -> None:
    assert run(on_symmetric, gather_in_new_memory) == [[0] * 4] * WORLD_SIZE


def free_memory_over_turns(collectives: Collectives) -> list[int]:
    """MiB that the device has left after each of some gathers whose buffers are dropped."""
    nbytes = 256 << 20
    free = []
    for _ in range(6):
        with collectives.allocation(BufferRole.GATHER, nbytes):
            out = torch.empty(nbytes, dtype=torch.uint8, device=collectives.device)
        own = out.narrow(0, collectives.rank * (nbytes // collectives.world_size), nbytes // collectives.world_size)
        collectives.all_gather(out, own).wait()
        del out, own
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(collectives.device)[0] >> 20)
    return free


@needs_two
def test_buffers_that_are_dropped_do_not_pile_up() -> None:
    for free in run(on_symmetric, free_memory_over_turns):
        assert min(free[2:]) > free[1] - 128


def kernels_of_a_gather(collectives: Collectives) -> list[str]:
    """Names of what the device does in one gather."""
    n = 1 << 20
    with collectives.allocation(BufferRole.GATHER, LARGE):
        out = torch.empty(collectives.world_size * n, dtype=torch.bfloat16, device=collectives.device)
    own = out.narrow(0, collectives.rank * n, n)
    collectives.all_gather(out, own).wait()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        collectives.all_gather(out, own).wait()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type is torch.autograd.DeviceType.CUDA]


@needs_two
def test_a_gather_is_copies_and_no_kernel_of_nccl() -> None:
    for names in run(on_symmetric, kernels_of_a_gather):
        if not names:
            pytest.skip("the profiler sees no device here")
        assert [name for name in names if "nccl" in name.lower()] == []
        assert sum("memcpy" in name.lower() for name in names) == WORLD_SIZE - 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(5))
        self.head = nn.Linear(96, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def train(rank: int, options: dict[str, Any], settings: dict[str, Any]) -> float:
    """Largest difference between a sharded model's parameters and an unsharded one's after six steps."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    reference = Net().to(device, torch.float64)
    config = polyshard.ShardConfig(
        collectives={"name": "symmetric", "smallest_mib": 0, **options},
        policy={"name": "module_class", "classes": [nn.Linear]},
        **settings,
    )
    model = polyshard.shard(copy.deepcopy(reference), config)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference)]
    for step in range(6):
        generator = torch.Generator(device).manual_seed(step)
        x = torch.randn(4 * WORLD_SIZE, 96, generator=generator, device=device, dtype=torch.float64)
        model(x.chunk(WORLD_SIZE)[rank]).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with polyshard.unsharded(model):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        return max((one - other).abs().max().item() for one, other in pairs)


@needs_two
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "shard_grad_op"},
        {"forward_prefetch": 2, "backward_prefetch": 2},
        {"forward_prefetch": 0, "backward_prefetch": 0},
        {"offload": "cpu"},
    ],
    ids=str,
)
def test_training_equals_the_unsharded_model(settings: dict[str, Any]) -> None:
    assert max(run(train, {}, settings)) < 1e-10


@needs_two
def test_buffers_may_be_cut_from_one_piece_of_memory() -> None:
    assert max(run(train, {"reserve_mib": 64}, {"strategy": "shard_grad_op"})) < 1e-10
