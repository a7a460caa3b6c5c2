"""What ``symmetric`` adds to NCCL, without devices: ranks are threads that map each other's host memory."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from polyshard.errors import CollectiveError, ConfigError, DeviceError
from polyshard.interfaces import BufferRole, PluginContext, ReduceOp
from polyshard_backends import _torch_private, symmetric
from polyshard_backends.nccl import NcclCollectives
from polyshard_backends.places import Place, obstacle
from polyshard_backends.symmetric import PeerMemory, SymmetricCollectives
from processes import run_processes

CPU = torch.device("cpu", 0)
SEGMENT = 1 << 16
TIMEOUT_S = 20.0


class Host:
    """Memory of all ranks. Segment ``i`` of a rank is the ``order[rank][i]``-th by address."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self.orders = orders
        self.world_size = len(orders)
        self.meeting = threading.Barrier(self.world_size)
        self.objects: list[Any] = [None] * self.world_size
        self.arenas = [torch.zeros(len(order) * SEGMENT, dtype=torch.uint8) for order in orders]
        self.probes: list[torch.Tensor] = [torch.empty(0)] * self.world_size
        self.fails_on: int | None = None
        #: Seconds by which a rank is late before each copy, to let the others run ahead.
        self.delays = [0.0] * self.world_size
        #: Barriers that a rank came to, for gathers and for exchanges alike.
        self.barriers = [0] * self.world_size

    def segment(self, rank: int, number: int) -> torch.Tensor:
        return self.arenas[rank].narrow(0, self.orders[rank][number] * SEGMENT, SEGMENT)

    def exchange(self, rank: int, obj: Any) -> list[Any]:
        self.objects[rank] = obj
        self.meeting.wait(TIMEOUT_S)
        everyone = list(self.objects)
        self.meeting.wait(TIMEOUT_S)
        return everyone


class Group:
    """What ``PeerMemory`` asks of a process group."""

    def __init__(self, host: Host, rank: int) -> None:
        self.host = host
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.host.world_size


class Handle:
    """The segment of every rank that belongs to one of this rank's."""

    def __init__(self, host: Host, rank: int, segments: list[torch.Tensor]) -> None:
        self.host = host
        self.rank = rank
        self.segments = segments
        self.buffer_ptrs = [segment.data_ptr() for segment in segments]
        self.buffer_size = segments[rank].numel()

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        return self.segments[rank].view(dtype).narrow(0, storage_offset, sizes[0])

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms == TIMEOUT_S * 1e3
        self.host.barriers[self.rank] += 1
        time.sleep(self.host.delays[self.rank])
        self.host.meeting.wait(TIMEOUT_S)


def handle_of(tensor: torch.Tensor, group: Group) -> Handle | None:
    host, rank = group.host, group.rank()
    offset = tensor.data_ptr() - host.arenas[rank].data_ptr()
    inside = 0 <= offset < host.arenas[rank].numel()
    if not inside and tensor.dtype is not torch.uint8:
        return None
    if not inside:
        host.probes[rank] = tensor
    host.meeting.wait(TIMEOUT_S)
    if host.fails_on == rank:
        raise RuntimeError("cuMemImportFromShareableHandle failed")
    if not inside:
        return Handle(host, rank, host.probes)
    number = host.orders[rank].index(offset // SEGMENT)
    return Handle(host, rank, [host.segment(each, number) for each in range(host.world_size)])


class Scope(nullcontext[None]):
    """The scope of memory that is there already."""

    made = 0


#: The places of tensors that the allocator was asked for.
ASKED: list[int] = []


def held(pool: object, tensor: torch.Tensor) -> bool:
    ASKED.append(tensor.data_ptr())
    return tensor.dtype is not torch.float32


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch_private, "symmetric_pool", lambda device, divisible: None)
    monkeypatch.setattr(symmetric, "ZeroedScope", lambda pool, index: Scope())
    monkeypatch.setattr(_torch_private, "symmetric_handle", handle_of)
    monkeypatch.setattr(_torch_private, "holds", held)
    monkeypatch.setattr(_torch_private, "current_stream", lambda device_index: (0, device_index, 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def on_ranks(host: Host, fn: Callable[[int, PeerMemory], Any]) -> list[Any]:
    def one(rank: int) -> Any:
        memory = PeerMemory(
            Group(host, rank),  # type: ignore[arg-type]
            CPU,
            lambda obj: host.exchange(rank, obj),
            timedelta(seconds=TIMEOUT_S),
        )
        return fn(rank, memory)

    with ThreadPoolExecutor(host.world_size) as pool:
        return [future.result(60.0) for future in [pool.submit(one, rank) for rank in range(host.world_size)]]


def sent(rank: int, turn: int, n: int) -> torch.Tensor:
    return ((torch.arange(n) * 7 + rank * 31 + turn * 101) % 251).to(torch.bfloat16)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("offset", [0, 512])
def test_every_slice_arrives_turn_after_turn(world_size: int, offset: int) -> None:
    host = Host([[0, 1]] * world_size)
    n = 1001
    # A rank that is behind must not be overtaken: its slice is read before it is written, or written before read.
    host.delays[world_size - 1] = 0.002

    def gather(rank: int, memory: PeerMemory) -> list[torch.Tensor]:
        assert memory.meet() == ""
        got = []
        for turn in range(6):
            whole = host.segment(rank, turn % 2).view(torch.bfloat16).narrow(0, offset, world_size * n)
            whole.narrow(0, rank * n, n).copy_(sent(rank, turn, n))
            pull = memory.pull_of(whole)
            assert pull is not None
            assert pull.own.data_ptr() == whole.data_ptr() + rank * n * 2
            memory.run(pull)
            got.append(whole.clone())
        return got

    for got in on_ranks(host, gather):
        for turn, whole in enumerate(got):
            assert torch.equal(whole, torch.cat([sent(rank, turn, n) for rank in range(world_size)]))


def test_parts_of_one_buffer_are_copied_between_one_pair_of_barriers() -> None:
    host, sizes = Host([[0, 1]] * 3), (5, 1, 64)

    def train(rank: int, memory: PeerMemory) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
        assert memory.meet() == ""
        wholes = list(host.segment(rank, 0).view(torch.bfloat16)[: 3 * sum(sizes)].split([3 * n for n in sizes]))
        fulls = list(host.segment(rank, 1).view(torch.bfloat16)[: 3 * sum(sizes)].split([3 * n for n in sizes]))
        for number, (n, whole, full) in enumerate(zip(sizes, wholes, fulls, strict=True)):
            whole[rank * n : (rank + 1) * n] = sent(rank, number, n)
            full.copy_(torch.cat([sent(rank, 10 * number + receiver, n) for receiver in range(3)]))
        pulls, parts = [memory.pull_of(each) for each in wholes], [memory.parts_of(each) for each in fulls]
        received = [torch.empty_like(full) for full in fulls]
        before = host.barriers[rank]
        memory.run(*[pull for pull in pulls if pull is not None])
        memory.exchange([(part, out) for part, out in zip(parts, received, strict=True) if part is not None])
        return [whole.clone() for whole in wholes], received, host.barriers[rank] - before

    for receiver, (wholes, received, barriers) in enumerate(on_ranks(host, train)):
        assert barriers == 4
        for number, (n, whole, out) in enumerate(zip(sizes, wholes, received, strict=True)):
            assert torch.equal(whole, torch.cat([sent(rank, number, n) for rank in range(3)]))
            assert torch.equal(out, torch.cat([sent(rank, 10 * number + receiver, n) for rank in range(3)]))


def test_other_memory_is_left_to_nccl_and_looked_for_once_until_the_pool_grows() -> None:
    def ask(rank: int, memory: PeerMemory) -> list[int]:
        memory.meet()
        other, counts = torch.zeros(64), []
        for made in (0, 0, 1, 1):
            memory.scope.made = made
            assert memory.pull_of(other) is None
            assert memory.problem == ""
            counts.append(ASKED.count(other.data_ptr()))
        return counts

    assert on_ranks(Host([[0], [0]]), ask) == [[1, 1, 2, 2]] * 2


def test_segments_in_another_order_of_addresses_are_given_up_on_every_rank() -> None:
    host = Host([[0, 1], [1, 0]])

    def ask(rank: int, memory: PeerMemory) -> tuple[list[bool], str]:
        memory.meet()
        # The first has none beside it; the second lies above it on rank 0, and below it on rank 1.
        found = [memory.pull_of(host.segment(rank, number)) is not None for number in (0, 1, 0)]
        return found, memory.problem

    answers = on_ranks(host, ask)
    assert answers[0] == answers[1]
    found, problem = answers[0]
    assert found == [True, False, False]
    assert "does not lie alike on all ranks" in problem


def test_a_rank_that_cannot_map_memory_is_heard_by_all() -> None:
    host = Host([[0], [0], [0]])
    host.fails_on = 1

    def ask(rank: int, memory: PeerMemory) -> tuple[str, bool]:
        return memory.meet(), memory.pull_of(host.segment(rank, 0)) is None

    said, unused = on_ranks(host, ask)[0]
    assert said == "rank 1 could not map the others' memory: cuMemImportFromShareableHandle failed"
    assert unused
    assert on_ranks(host, ask) == [(said, True)] * 3


def test_memory_is_not_shared_between_hosts_or_after_a_problem() -> None:
    here = Place("one", 0, 8, "")
    assert "2 hosts" in obstacle([here, Place("two", 1, 8, "")])
    assert obstacle([here, Place("one", 1, 8, "no symmetric memory")]) == "no symmetric memory"
    # Two processes that see one device each: only trying tells.
    assert obstacle([Place("one", 0, 1, ""), Place("one", 0, 1, "")]) == ""


@pytest.mark.parametrize("options", [{"smallest_mib": -1}, {"smallest_mib": 1.5}, {"reserve_mib": True}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    context = PluginContext("symmetric", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"'symmetric': {next(iter(options))} is"):
        SymmetricCollectives(context, **options)
    with pytest.raises(ConfigError, match="'symmetric': smallest_mib is -1; give an integer, 0 or more"):
        NcclCollectives(context, smallest_mib=-1)
    with pytest.raises(ConfigError, match="communicators is 3; give 1 or 2"):
        SymmetricCollectives(context, communicators=3)
    with pytest.raises(DeviceError, match="serves cuda tensors"):
        SymmetricCollectives(PluginContext("symmetric", torch.device("cpu")))


class OnGloo(SymmetricCollectives):
    """The same over gloo, on a host whose ranks have no symmetric memory."""

    transport = "gloo"
    device_type = "cpu"


def gather_without_symmetric_memory(rank: int) -> tuple[list[float], list[str]]:
    _torch_private.current_stream = lambda device_index: (0, device_index, 1)
    torch.cuda.is_current_stream_capturing = lambda: False
    collectives = OnGloo(PluginContext("symmetric", CPU, timeout=timedelta(seconds=TIMEOUT_S)), smallest_mib=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            with collectives.allocation(BufferRole.GATHER, 24):
                out = torch.zeros(6)
            own = out.narrow(0, rank * 3, 3).fill_(rank + 1.0)
            collectives.all_gather(out, own).wait()
    collectives.close()
    return out.tolist(), [str(warning.message) for warning in said]


@pytest.mark.slow
def test_without_symmetric_memory_gathers_are_nccls_and_one_rank_says_so_once() -> None:
    answers = run_processes(2, gather_without_symmetric_memory, timeout=60.0)
    assert [out for out, _ in answers] == [[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]] * 2
    (said,), none = (messages for _, messages in answers)
    assert said.startswith("collectives 'symmetric': gathers and reductions are NCCL's: ")
    assert none == []


class PlainOnGloo(NcclCollectives):
    """``nccl`` over gloo, which registers nothing."""

    transport = "gloo"
    device_type = "cpu"

    def barrier(self) -> None:
        pass


def reduce_many(rank: int) -> list[list[float]]:
    torch.cuda.is_current_stream_capturing = lambda: False
    _torch_private.current_stream = lambda device_index: (0, device_index, 1)
    collectives = PlainOnGloo(PluginContext("nccl", CPU, timeout=timedelta(seconds=TIMEOUT_S)))
    results = []
    # Narrow ones that widen, a mixture, and too short an input.
    for dtypes in ((torch.float16, torch.float16), (torch.float16, torch.float32)):
        triples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        for number, dtype in enumerate(dtypes, 1):
            full = torch.arange(4 * number, dtype=dtype) * (rank + 1)
            triples.append((torch.zeros(2 * number), full, torch.empty(4 * number * full.itemsize, dtype=torch.uint8)))
        collectives.reduce_scatter_many(triples, op=ReduceOp.SUM).wait()
        results += [out.tolist() for out, _, _ in triples]
    triples[1] = (torch.zeros(3), torch.zeros(4, dtype=torch.float16), None)
    triples[0] = (torch.zeros(2), torch.zeros(4, dtype=torch.float16), None)
    with pytest.raises(CollectiveError, match="the whole has 4 elements and the slice 3"):
        collectives.reduce_scatter_many(triples, op=ReduceOp.SUM)
    collectives.close()
    return results


@pytest.mark.slow
def test_many_reductions_are_those_of_each() -> None:
    def sums(numel: int) -> list[float]:
        return [3.0 * value for value in range(numel)]

    first, second = run_processes(2, reduce_many, timeout=60.0)
    assert [a + b for a, b in zip(first, second, strict=True)] == [sums(4), sums(8)] * 2


def registering(rank: int) -> list[int]:
    """How many warnings there are that memory was to be registered, and was not, after each allocation."""
    torch.cuda.is_current_stream_capturing = lambda: False
    collectives = PlainOnGloo(PluginContext("nccl", CPU, timeout=timedelta(seconds=TIMEOUT_S)))
    counts = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for role, nbytes in (
            (BufferRole.GATHER, (16 << 20) - 1),
            (BufferRole.REDUCE, 16 << 20),
            (BufferRole.GATHER, 16 << 20),
            (BufferRole.GATHER, 16 << 20),
        ):
            with collectives.allocation(role, nbytes):
                pass
            counts.append(sum("registering it failed" in str(each.message) for each in said))
    return counts


@pytest.mark.slow
def test_large_gather_buffers_are_registered_by_default_and_where_that_fails_one_rank_says_so_once() -> None:
    assert run_processes(2, registering, timeout=60.0) == [[0, 0, 1, 1], [0, 0, 0, 0]]
