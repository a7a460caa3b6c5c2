"""NCCL, with what large gathers and reductions send on one host copied by the devices' copy engines."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError
from polyshard.interfaces import BufferRole, PluginContext, Work
from typing_extensions import override

from . import _torch_private
from .nccl import MIB, NcclCollectives, SharedScope, StreamWork, check_mib
from .places import Place, obstacle
from .process_group import SharedGroups

#: MiB of a whole unit from which on copy engines move what it sends. Below, two barriers of all ranks cost more than
#: the multiprocessors that the copies leave to computation (benchmarks/figures.md, "Gathers and reductions alone").
SMALLEST_COPIED_MIB = 32
#: Buffers in symmetric memory.
_ROLES = (BufferRole.GATHER, BufferRole.REDUCE)
#: The ranks of each group of this process that has met over such memory. Of the process, as torch counts meetings.
_MET: set[tuple[int, ...]] = set()


class SymmetricCollectives(NcclCollectives):
    """``nccl``, whose large gathers and reductions are copies out of the other ranks' memory.

    Gather buffers and inputs of reductions lie in symmetric memory, which every rank of the host maps of every other. A
    gather waits until all ranks have written their slices, copies them by the copy engines, and waits until all have
    read: computation keeps all multiprocessors. A reduction that widens copies what NCCL's all-to-all would send, and
    sums by a kernel. Small operations, reductions that do not widen, and tensors in other memory are NCCL's. So are
    exchanges: a block's place in another rank's memory follows from splits that only that rank has. A captured step
    copies where the steps before it did.

    Where ranks are on several hosts, devices cannot access each other, or torch has no symmetric memory or would set up
    multicast, every gather is NCCL's, on all ranks alike, with a warning from the first rank.

    torch numbers a process's meetings over such memory through all groups (``StoreExchange`` in its headers, 2.13). So
    the ranks of a group must have met equally often before: groups side by side do, a group of some ranks and one of
    all do not, and the larger one's ranks then wait for each other until the process group's timeout.

    Ranks must gather and release units in one order: a copy reads the same place of another rank's memory. Where a rank
    never arrives, the device fails with an error of CUDA's, after the longer of the context's timeout and the process
    group's.

    Args:
        context: as for ``nccl``.
        smallest_mib: MiB of a whole unit from which on its gathers and reductions are copies. In a captured step, where
            the host issues none of them, fewer are worth it: 8. Reductions of units of several parameters up to 64 MiB
            are one exchange by NCCL all the same.
        reductions: whether reductions are; their inputs then stay in this memory, and serve nothing else.
        reserve_mib: MiB of a first segment that is divided among buffers; 0 for one segment a buffer. Give all
            that is gathered at once where the warning says that segments do not lie alike on all ranks.
        communicators: as for ``nccl``.

    Raises:
        StateError: ``torch.distributed`` is not initialised.
        DeviceError: the context's device is not CUDA.
        WorldSizeError: this process is not in the group.
        ConfigError: an option has a value that it cannot take.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        smallest_mib: int = SMALLEST_COPIED_MIB,
        reductions: bool = True,
        reserve_mib: int = 0,
        communicators: int = 2,
    ) -> None:
        if not isinstance(reductions, bool):
            raise ConfigError(f"collectives {context.name!r}: reductions is {reductions!r}; give true or false")
        check_mib(context, "smallest_mib", smallest_mib)
        check_mib(context, "reserve_mib", reserve_mib)
        super().__init__(context, communicators=communicators)
        self._smallest_nbytes = smallest_mib * MIB
        self._reserve_nbytes = reserve_mib * MIB
        self._roles = _ROLES if reductions else _ROLES[:1]

    @override
    def _enter(self, context: PluginContext, given: dist.ProcessGroup) -> None:
        super()._enter(context, given)
        self._smallest_nbytes = self._reserve_nbytes = 0
        self._roles = _ROLES
        self._memory: PeerMemory | None = None
        #: Why everything is NCCL's; empty while nothing speaks against copies.
        self._problem = "there is one rank" if self._world_size == 1 else ""

    @override
    def _enter_part(self, whole: Any, shared: SharedGroups) -> None:
        super()._enter_part(whole, shared)
        self._smallest_nbytes = whole._smallest_nbytes
        self._reserve_nbytes = whole._reserve_nbytes
        self._roles = whole._roles

    @override
    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        if role in self._roles and nbytes >= self._smallest_nbytes and not self._problem:
            if not torch.cuda.is_current_stream_capturing():
                memory = self._memory
                # Where nothing is gathered, nothing is reduced to shards.
                if memory is None and role is BufferRole.GATHER:
                    memory = self._open_memory()
                if memory is not None:
                    return memory.scope
            # A capture can take no new memory, which the other ranks would have to map.
            elif self._memory is not None and self._memory.scope.has_room(nbytes):
                return self._memory.scope
        return super().allocation(role, nbytes)

    @override
    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        super().prepare_capture(stream, like)
        if self._memory is not None:
            self._memory.scope.share(stream, like)

    def _open_memory(self) -> PeerMemory | None:
        """Every rank's first allocation for a gather meets here."""
        memory: PeerMemory | None = None
        met = frozenset(_MET | _torch_private.symmetric_groups())
        problem = self._obstacle(self.all_gather_object(Place.here(self._device_number(), met)))
        if not problem:
            failure = ""
            _MET.add(tuple(dist.get_process_group_ranks(self.process_group)))
            device = torch.device("cuda", self._device_number())
            try:
                memory = PeerMemory(
                    self.gather_group(),
                    device,
                    self.all_gather_object,
                    max(self._context.timeout, _torch_private.group_timeout(self.process_group, device)),
                    self._reserve_nbytes,
                )
            except RuntimeError as error:
                failure = f"rank {self._rank}: {error}"
            # Before memory is mapped: a rank that waits for one that has none would wait for long.
            failures = [text for text in self.all_gather_object(failure) if text]
            problem = failures[0] if failures or memory is None else memory.meet()
        if problem or memory is None:
            self._give_up(problem)
            return None
        self._memory = memory
        return memory

    def _obstacle(self, places: list[Place]) -> str:
        """Why the ranks at ``places`` do not copy, alike on all of them; empty where they do."""
        return obstacle(places)

    def _give_up(self, problem: str) -> None:
        self._problem = problem
        self._warn(f"gathers and reductions are NCCL's: {problem}")

    #: What ranks that copy have in common, and what they are asked for.
    _sharing: ClassVar[str] = "devices that access each other"

    @property
    @override
    def reason(self) -> str:
        if self._problem:
            return f"nccl: {self._problem}"
        where = f"{self._world_size} ranks on one host, {self._sharing}"
        way = f"units from {self._smallest_nbytes // MIB} MiB by copy engines, the rest by NCCL"
        if self._memory is None:
            return f"symmetric, if it finds {where} ({way}); nccl otherwise. Ranks ask at the first such unit"
        return f"symmetric: {where}; {way}"

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        memory = self._memory
        if memory is not None and out.nbytes >= self._smallest_nbytes and self._fits(out, shard):
            try:
                pull = memory.pull_of(out)
                if pull is not None:
                    if shard.data_ptr() != pull.own.data_ptr():
                        pull.own.copy_(shard.view(torch.uint8), non_blocking=True)
                    memory.run(pull)
                    return StreamWork(self._device_index)
            except RuntimeError as error:
                raise self._translated(error, "all_gather") from error
            self._note_problem(memory)
        return super().all_gather(out, shard)

    @override
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        memory = self._memory
        if memory is None or sum(out.nbytes for out, _ in pairs) < self._smallest_nbytes:
            return super().all_gather_many(pairs)
        pulls: list[Pull] = []
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            # Parts of one unit lie in one buffer: that is large where it is in this memory.
            for out, shard in pairs:
                pull = memory.pull_of(out) if self._fits(out, shard) else None
                if pull is None:
                    others.append((out, shard))
                    continue
                pulls.append(pull)
                if shard.data_ptr() != pull.own.data_ptr():
                    pull.own.copy_(shard.view(torch.uint8), non_blocking=True)
            if pulls:
                memory.run(*pulls)
        except RuntimeError as error:
            raise self._translated(error, "all_gather") from error
        self._note_problem(memory)
        return super().all_gather_many(others) if others else StreamWork(self._device_index)

    def _note_problem(self, memory: PeerMemory) -> None:
        if memory.problem and not self._problem:
            self._give_up(memory.problem)

    @override
    def _exchange(self, channel: _torch_private.Channel, received: torch.Tensor, full: torch.Tensor) -> None:
        self._exchange_many(channel, [received], [full])

    @override
    def _exchange_many(
        self, channel: _torch_private.Channel, received: list[torch.Tensor], fulls: list[torch.Tensor]
    ) -> None:
        memory = self._memory if BufferRole.REDUCE in self._roles else None
        if memory is not None and sum(full.nbytes for full in fulls) >= self._smallest_nbytes:
            copied: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = []
            others: list[tuple[torch.Tensor, torch.Tensor]] = []
            for out, full in zip(received, fulls, strict=True):
                parts = memory.parts_of(full) if full.is_contiguous() and full.numel() else None
                if parts is None:
                    others.append((out, full))
                else:
                    copied.append((parts, out))
            if copied:
                memory.exchange(copied)
            self._note_problem(memory)
            received, fulls = [out for out, _ in others], [full for _, full in others]
        if len(fulls) == 1:
            super()._exchange(channel, received[0], fulls[0])
        elif fulls:
            super()._exchange_many(channel, received, fulls)

    def _fits(self, out: torch.Tensor, shard: torch.Tensor) -> bool:
        """Whether these are tensors that NCCL would accept, and not empty."""
        return (
            0 < out.nbytes == shard.nbytes * self._world_size
            and out.dtype is shard.dtype
            and out.is_contiguous()
            and shard.is_contiguous()
        )

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        # Ranks agree about this memory by objects, which must not travel through it.
        memory, self._memory = self._memory, None
        try:
            return super().all_gather_object(obj)
        finally:
            self._memory = memory

    @override
    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        super().close()


#: Bytes a rank of the gather by which new memory is tried.
_PROBE_BYTES = 64 * 1024
#: Places outside of the pool that are remembered at most.
_MOST_ELSEWHERE = 4096


class Use(enum.IntEnum):
    """The use of memory; also the channel on which ranks signal each other about it."""

    GATHER = 0
    EXCHANGE = 1


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of device memory that every rank has alike."""

    begin: int
    nbytes: int
    handle: _torch_private.SymmetricHandle
    use: Use


class Pull(NamedTuple):
    """The copies of one gather: into the other ranks' slices of the own buffer."""

    copies: tuple[tuple[Callable[[torch.Tensor, bool], Any], torch.Tensor], ...]
    """``copy_`` of each slice, and the same slice of the rank that it belongs to."""
    own: torch.Tensor
    """This rank's slice, as bytes."""


class PeerMemory:
    """A pool whose segments every rank of ``group`` has mapped of every other.

    [Note: one rank's buffer is every rank's]
    A gather copies from another rank's memory at the place of its own buffer. Ranks allocate and release in one order,
    so that the allocator serves them alike, with one exception: among free blocks of one size, older versions of torch
    take the one at the lowest address, and addresses differ between ranks. So a new segment must have the same place in
    the order of addresses on every rank; otherwise all ranks stop using the pool.

    Args:
        group: with NCCL for CUDA; its ranks all construct one, and call ``meet``.
        device: of this rank.
        exchange: every rank's object, in rank order.
        timeout: after which a rank that waits for another fails.
        reserve_nbytes: size of a first segment that is divided among buffers; 0 for one segment a buffer.

    Raises:
        RuntimeError: there is no such memory here.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        exchange: Callable[[Any], list[Any]],
        timeout: timedelta,
        reserve_nbytes: int = 0,
    ) -> None:
        self._group = group
        self._rank = group.rank()
        self._world_size = group.size()
        # Each rank begins with its neighbour, so that no rank is read by all at once.
        self._peers = [(self._rank + step) % self._world_size for step in range(1, self._world_size)]
        self._exchange = exchange
        self._timeout_ms = max(1, round(timeout.total_seconds() * 1e3))
        self._divisible = reserve_nbytes > 0
        self._pool = _torch_private.symmetric_pool(device, divisible=self._divisible)
        index = torch.cuda.current_device() if device.index is None else device.index
        self.scope = ZeroedScope(self._pool, index)
        """Memory that is allocated inside is taken from the pool."""
        self.problem = ""
        """The reason why the pool is used no more; the same on every rank."""
        self._segments: list[_Segment] = []
        self._pulls: dict[tuple[int, int], Pull] = {}
        self._parts: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
        # Places outside of the pool, while it has ``_made`` segments: asking the allocator walks all of them.
        self._elsewhere: set[tuple[int, int]] = set()
        self._made = 0
        self._signals: _torch_private.SymmetricHandle | None = None
        self._last_streams: dict[Use, tuple[int, int, int]] = {}
        self._index = index
        with torch.inference_mode(False), self.scope:
            self._probe = torch.empty(self._world_size * _PROBE_BYTES, dtype=torch.uint8, device=device)
            if reserve_nbytes:
                # Back in the pool at once, and cut into buffers from there.
                torch.empty(reserve_nbytes, dtype=torch.uint8, device=device)

    def meet(self) -> str:
        """Map the other ranks' memory and try a gather; every rank calls it. Returns what went wrong, on all alike."""
        # Never given back, so that its place among other segments does not matter.
        segment = self._map(self._probe, Use.GATHER, ordered=False)
        if segment is None:
            self.problem = self.problem or "memory of the pool is not symmetric"
            return self.problem
        self._signals = segment.handle
        problem = ""
        try:
            offset = self._probe.data_ptr() - segment.begin
            problem = self._try(self._make_pull(segment, offset, self._probe.nbytes))
        except RuntimeError as error:
            problem = f"rank {self._rank}: {error}"
        found = [text for text in self._exchange(problem) if text]
        self.problem = found[0] if found else ""
        return self.problem

    def _try(self, pull: Pull) -> str:
        rows = self._probe.view(self._world_size, _PROBE_BYTES)
        # Twice, with other values: shows stale memory, and barriers that do not wait.
        for turn in (1, 101):
            rows[self._rank].fill_(turn + self._rank)
            self.run(pull)
            got = rows.amin(1).tolist() + rows.amax(1).tolist()
            expected = [turn + rank for rank in range(self._world_size)] * 2
            if got != expected:
                return f"rank {self._rank} gathered {got} instead of {expected}"
        return ""

    def pull_of(self, out: torch.Tensor) -> Pull | None:
        """The copies that gather into ``out`` (``[world_size * n]``, contiguous); None where it is in other memory.

        Meets the other ranks where ``out`` lies in a segment that is new.
        """
        if self.problem:
            return None
        address, nbytes = out.data_ptr(), out.nbytes
        pull = self._pulls.get((address, nbytes))
        if pull is None:
            segment = self._segment_of(address, nbytes) or self._new_segment(out, Use.GATHER)
            if segment is not None:
                pull = self._pulls[address, nbytes] = self._make_pull(segment, address - segment.begin, nbytes)
        return pull

    def parts_of(self, full: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """This rank's part, as bytes, of what every rank has in the place of ``full`` (``[world_size * n]``), by rank.

        None where ``full`` is in other memory. Meets the other ranks as ``pull_of`` does.
        """
        if self.problem:
            return None
        address, nbytes = full.data_ptr(), full.nbytes
        parts = self._parts.get((address, nbytes))
        if parts is None:
            segment = self._segment_of(address, nbytes) or self._new_segment(full, Use.EXCHANGE)
            if segment is not None:
                offset, n = address - segment.begin, nbytes // self._world_size
                with torch.inference_mode(False):
                    parts = tuple(
                        _slice_of(segment, rank, offset + self._rank * n, n) for rank in range(self._world_size)
                    )
                self._parts[address, nbytes] = parts
        return parts

    def _segment_of(self, address: int, nbytes: int) -> _Segment | None:
        position = bisect.bisect_right(self._segments, address, key=lambda segment: segment.begin) - 1
        if position >= 0:
            segment = self._segments[position]
            if address + nbytes <= segment.begin + segment.nbytes:
                return segment
        return None

    def _new_segment(self, out: torch.Tensor, use: Use) -> _Segment | None:
        if torch.cuda.is_current_stream_capturing():
            # Memory of the graph, which no other process maps; and nothing may wait here.
            return None
        if self._made != self.scope.made or len(self._elsewhere) > _MOST_ELSEWHERE:
            self._made = self.scope.made
            self._elsewhere.clear()
        place = out.data_ptr(), out.nbytes
        if place in self._elsewhere or not _torch_private.holds(self._pool, out):
            # A gather of encoded bytes, say, which comes back in every step.
            self._elsewhere.add(place)
            return None
        segment = self._map(out, use, ordered=True)
        if segment is not None:
            bisect.insort(self._segments, segment, key=lambda each: each.begin)
        return segment

    def _map(self, tensor: torch.Tensor, use: Use, *, ordered: bool) -> _Segment | None:
        """The segment that ``tensor`` lies in, once all ranks have one alike; None, and perhaps a problem, if not."""
        segment, problem = None, ""
        try:
            handle = _torch_private.symmetric_handle(tensor, self._group)
            if handle is None:
                return None
            segment = _Segment(handle.buffer_ptrs[self._rank], handle.buffer_size, handle, use)
            facts: tuple[int, ...] = (segment.nbytes, tensor.data_ptr() - segment.begin, tensor.nbytes)
            if ordered:
                # Undivided, a block is a segment, and only those of one size, that one stream took, can be taken for
                # each other.
                rivals = [
                    each
                    for each in self._segments
                    if each.use is use and (self._divisible or each.nbytes == segment.nbytes)
                ]
                facts += (len(rivals), sum(each.begin < segment.begin for each in rivals))
        except RuntimeError as error:
            facts, problem = (), f"rank {self._rank} could not map the others' memory: {error}"
        everyone = self._exchange((problem, facts))
        problems = [text for text, _ in everyone if text]
        if not problems and any(each != everyone[0] for each in everyone):
            problems = [f"segment {len(self._segments)} does not lie alike on all ranks: {[f for _, f in everyone]}"]
        if problems:
            self.problem = problems[0]
            return None
        return segment

    def _make_pull(self, segment: _Segment, offset: int, nbytes: int) -> Pull:
        n = nbytes // self._world_size
        # Written by every gather from now on, which an inference tensor could not be.
        with torch.inference_mode(False):
            own = _slice_of(segment, self._rank, offset + self._rank * n, n)
            copies = tuple(
                (
                    _slice_of(segment, self._rank, offset + peer * n, n).copy_,
                    _slice_of(segment, peer, offset + peer * n, n),
                )
                for peer in self._peers
            )
        return Pull(copies, own)

    def run(self, *pulls: Pull) -> None:
        """Gather, on the current stream; what was issued there before has written the own slices."""
        self._meet_on_stream(Use.GATHER)
        for pull in pulls:
            for copy, source in pull.copies:
                copy(source, True)
        self._part_on_stream(Use.GATHER)

    def exchange(self, pairs: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]]) -> None:
        """Bring the parts of each pair together in its tensor (``[world_size * n]``, contiguous), on the current
        stream.

        What was issued there before has written this rank's memory.
        """
        rows = [received.view(torch.uint8).view(self._world_size, -1) for _, received in pairs]
        self._meet_on_stream(Use.EXCHANGE)
        for own, (parts, _) in zip(rows, pairs, strict=True):
            for peer in self._peers:
                own[peer].copy_(parts[peer], True)
        self._part_on_stream(Use.EXCHANGE)
        # Behind the barrier: no other rank reads or waits for it.
        for own, (parts, _) in zip(rows, pairs, strict=True):
            own[self._rank].copy_(parts[self._rank], True)

    def _meet_on_stream(self, use: Use) -> None:
        """Order the current stream after all that the ranks have written for this."""
        signals = self._signals
        assert signals is not None
        # A capture begins with an idle device, may wait for nothing before it, and uses one stream for each of these.
        if not torch.cuda.is_current_stream_capturing():
            stream = _torch_private.current_stream(self._index)
            last = self._last_streams.get(use, stream)
            if last != stream:
                # Signals of two gathers at once would be taken for each other's.
                _torch_private.stream_of(stream).wait_stream(_torch_private.stream_of(last))
            self._last_streams[use] = stream
        signals.barrier(use, self._timeout_ms)

    def _part_on_stream(self, use: Use) -> None:
        """Order the current stream after all that the ranks have read, which may then be written again."""
        assert self._signals is not None
        self._signals.barrier(use, self._timeout_ms)

    def close(self) -> None:
        """Let go of the memory. Buffers that were allocated from the pool keep theirs."""
        self.problem = self.problem or "closed"
        self._pulls.clear()
        self._parts.clear()
        self._segments.clear()
        self._signals = None


class ZeroedScope(SharedScope):
    """``SharedScope`` of a pool whose new segments torch zeroes on the legacy default stream.

    torch's own streams do not wait for that one, and zeros would overwrite the slice that a gather wrote meanwhile. So
    the current stream waits for it when the scope is left.
    """

    def __init__(self, pool: torch.cuda.MemPool, index: int) -> None:
        super().__init__(pool, index)
        self.made = self._count()
        """Segments that the device's allocator had made when the scope was left last; the pool has no newer one."""

    @override
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        made = self._count()
        if made != self.made:
            self.made = made
            # A capture takes no new segment of this pool: new ones are others'.
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self._index).wait_stream(torch.cuda.default_stream(self._index))

    def _count(self) -> int:
        made: int = torch.cuda.memory_stats_as_nested_dict(self._index)["segment"]["all"]["allocated"]
        return made


def _slice_of(segment: _Segment, owner: int, at: int, nbytes: int) -> torch.Tensor:
    """``nbytes`` of a rank's memory, ``at`` bytes behind the segment's begin."""
    tensor = segment.handle.get_buffer(owner, (nbytes,), torch.uint8, at)
    if tensor.data_ptr() != segment.handle.buffer_ptrs[owner] + at:
        raise RuntimeError(f"torch {torch.__version__} gave memory of rank {owner} at another offset than {at}")
    return tensor
