"""The streams of a step: where gathers, compute and reductions run, in which order, and how long compute waits.

[Note: ordering without blocking the host]
Gathers run on one stream, reductions on another, compute on the caller's. Memory passes from one to the next by events
only:

1. A gather writes after every event that a reshard recorded: compute was the last to read the memory that it reuses.
2. Compute waits for the event of the one gather whose parameters it is about to use. Units that were gathered together
   have one event.
3. A reduction begins after compute has computed its gradients: the copies that bring them together run on its stream,
   beside compute. They, its input and what it is added to return to compute's memory pool after compute has been
   ordered behind the reduction: a backward that raises leaves ``.grad`` to the user before that. One input is filled
   while another travels.
4. At the start of a forward the gather stream waits for compute: the optimizer has then written the masters. So it does
   where a backward follows another one: memory that this one released may still be read.
5. At the end of a backward compute waits for the reductions: the optimizer may then read the gradients.

Compute may take several streams: a module's forward runs on the stream that is current when it is called, and autograd
runs a backward on the stream of its forward. Each rule then holds for all of them. The stream that owns the memory has
to wait, since its pool alone may give the memory out again: the one that takes a reduction's input, the one that
gathers. Units and gradients carry the places, a stream each, at which they were used or computed.

A module may use further streams before it returns, and these are out of sight. Its forward orders them after the stream
that calls it, and that one after them. Its backward is sure to wait only for the path to the gradients of its inputs.
So a module that computes on a stream of its own is best a unit of its own.

Device operations on the CPU run in the order in which they are issued, and only ``Work.wait`` blocks.

[Note: a rank's own time]
Ranks that train together take the same time for a step, whichever of them is slow: the others wait for it at the next
communication. The time that each waited tells them apart. For waits that block the host it is the time inside of the
call. On streams it lies between an event in front of a wait and one behind it, read long after both were recorded.
Transfers that take longer than the compute that hides them count as waiting, too, on all ranks alike.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from .. import _torch_private
from ..errors import CollectiveAbortedError, CollectiveError, CollectiveTimeoutError, PolyshardError
from ..interfaces import Clock, Collectives, StreamClock, Work
from ..planning.groups import ThenAllReduce, ThenToOwners
from .buffers import FlatBuffer, SecondaryShard
from .gather import Gatherable, allocation_of, end_gather, start_gathers, start_masters, wait_quietly
from .recorder import Issued, Recorder

_HERE: AbstractContextManager[Any] = nullcontext()
#: Reductions, or launches of several, whose inputs may be alive at once: one travels while another is filled.
REDUCTIONS_ALIVE = 2


class Reduction(NamedTuple):
    """The three calls of a reduction, in their order."""

    issue: Callable[[], Work]
    """Starts it."""
    deliver: Callable[[], object]
    """Uses its result. Returns what it wrote into, which lives on until the input is released."""
    retire: Callable[[], None]
    """Releases its input."""


class CommStreams(ABC):
    """Runs gathers and reductions beside compute. One instance serves all units of a root."""

    def __init__(self) -> None:
        #: Whether the host waits for other ranks, where only a time limit ends the wait. Read from any thread.
        self.waiting = False
        # Reductions that were issued and not retired, the oldest first.
        self._reductions: deque[Any] = deque()
        #: Its last entry is the gather or reduction that is issued next. That of a root, once it has these streams.
        self.recorder = Recorder(0)
        #: Told of waits for other ranks; None where nobody measures.
        self.waits: Waits | None = None

    def clock(self) -> Clock:
        """Tells when waits of compute begin and end."""
        return Clock()

    def begin_forward(self) -> None:
        """Order gathers after everything that was issued so far (rule 4)."""
        return None

    def meet(self, call: Callable[..., None], *args: object) -> None:
        """``call(*args)``, which may wait for the other ranks."""
        if self.waits is not None:
            self.waits.mark()
        self.waiting = True
        try:
            call(*args)
        finally:
            self.waiting = False
            if self.waits is not None:
                self.waits.mark()

    @abstractmethod
    def gather(self, units: Sequence[Gatherable]) -> None:
        """Issue the gathers of ``units``, at least one, as one communication."""

    @abstractmethod
    def arrive(self, unit: Gatherable) -> None:
        """Order compute after the gather of ``unit`` (rule 2)."""

    def follow(self) -> None:
        """Order compute here after all gathers so far, whether or not they have arrived elsewhere."""
        return None

    @abstractmethod
    def release(self, unit: Gatherable) -> None:
        """Give the gather buffer's memory back (rule 1)."""

    @abstractmethod
    def keep(self, unit: Gatherable, part: SecondaryShard) -> None:
        """Fill ``part`` from the gather buffer behind its last use, and give the buffer's memory back (rule 1)."""

    @abstractmethod
    def reduce(self, reduction: Reduction, taken_at: Sequence[object]) -> None:
        """Run ``reduction``, whose input was given memory at the places ``taken_at``, apart from the present one."""

    def make_room(self, alive: int = REDUCTIONS_ALIVE - 1) -> None:
        """Retire reductions until at most ``alive`` are left, so that one more input may be filled (rule 3)."""
        while len(self._reductions) > alive:
            self._retire_oldest()

    @abstractmethod
    def _retire_oldest(self) -> None:
        """Retire the reduction that was issued first."""

    def drain(self) -> None:
        """Order compute after every reduction, and retire them (rule 5)."""
        self.make_room(0)

    def give_up(self) -> None:
        """Wait for everything in flight and drop its errors: the caller handles an error already."""
        self.drain()

    def busy(self) -> bool:
        """Whether the device has not finished the operations issued here. Called from any thread."""
        return False

    def current(self) -> object:
        """The place of operations that are issued now: equal for equal streams, None without streams."""
        return None

    def between(self, places: Sequence[object]) -> AbstractContextManager[Any]:
        """Order operations inside after everything issued at ``places`` so far, and before everything issued later."""
        return _HERE


def streams_for(collectives: Collectives) -> CommStreams:
    """CUDA streams where these order the operations of ``collectives``."""
    if collectives.capabilities.stream_ordered and collectives.device.type == "cuda":
        return CudaStreams(collectives.device)
    return HostStreams()


class HostStreams(CommStreams):
    """For operations that run where they are issued, or on a backend's own threads until ``Work.wait``."""

    def __init__(self) -> None:
        super().__init__()
        self._gathers: dict[FlatBuffer, _Batch] = {}

    @override
    def gather(self, units: Sequence[Gatherable]) -> None:
        masters, entry = start_masters(units), self.recorder.last
        if masters:
            self._end(masters, entry)
            if entry is not None:
                # The gather itself is still to come.
                entry.ended = None
        for unit in units:
            unit.buffer.attach()
        batch = _Batch([(unit, unit.buffer) for unit in units], start_gathers(units), self.recorder.last)
        for unit in units:
            self._gathers[unit.buffer] = batch

    @override
    def arrive(self, unit: Gatherable) -> None:
        batch = self._gathers.get(unit.buffer)
        if batch is None:
            return
        waiting = [(other, buffer) for other, buffer in batch.units if self._gathers.get(buffer) is batch]
        for _, buffer in waiting:
            del self._gathers[buffer]
        self._end(batch.works, batch.issued)
        for other, _ in waiting:
            if other.unit.observers:
                end_gather(other)

    @override
    def release(self, unit: Gatherable) -> None:
        if unit.buffer in self._gathers:
            self.arrive(unit)
        unit.buffer.release()

    @override
    def keep(self, unit: Gatherable, part: SecondaryShard) -> None:
        self.arrive(unit)
        part.fill()
        unit.buffer.release()

    @override
    def reduce(self, reduction: Reduction, taken_at: Sequence[object]) -> None:
        if self._reductions:
            work, _, entry = self._reductions[-1]
            if isinstance(work, ThenAllReduce | ThenToOwners) and work.second is None:
                # At a place that is the same on all ranks. When the host waits for it is not: a rank makes room as soon
                # as it computes a gradient in place, and others may have none.
                self._end((work.first,), entry)
                work.proceed()
        self._reductions.append((reduction.issue(), reduction, self.recorder.last))

    def _end(self, works: Sequence[Work], entry: Issued | None) -> None:
        if self.waits is not None:
            self.waits.mark()
        self.waiting = True
        left = iter(works)
        try:
            for work in left:
                work.wait()
        except CollectiveError as error:
            if not isinstance(error, CollectiveTimeoutError | CollectiveAbortedError):
                wait_quietly(left)
            self.recorder.refuse(error, entry)
        except PolyshardError:
            wait_quietly(left)
            raise
        finally:
            self.waiting = False
            if self.waits is not None:
                self.waits.mark()
        if entry is not None:
            entry.ended = time.monotonic()

    @override
    def give_up(self) -> None:
        if self.recorder.failure is not None:
            # They do not end in time, if ever. The memory that they read and write stays alive until then.
            self._reductions.clear()
            self._gathers.clear()
            return
        while self._reductions:
            work, reduction, _ = self._reductions.popleft()
            wait_quietly((work,))
            reduction.deliver()
            reduction.retire()
        batches = list(dict.fromkeys(self._gathers.values()))
        self._gathers.clear()
        wait_quietly(work for batch in batches for work in batch.works)

    @override
    def _retire_oldest(self) -> None:
        work, reduction, entry = self._reductions.popleft()
        self._end((work,), entry)
        reduction.deliver()
        reduction.retire()


@dataclass(eq=False, slots=True)
class _Batch:
    """Units that were gathered together, where waiting blocks."""

    units: Sequence[tuple[Gatherable, FlatBuffer]]
    works: Sequence[Work]
    issued: Issued | None


class CudaStreams(CommStreams):
    """For CUDA and stream-ordered collectives."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """``cuda``: has the streams and events. What stands for ``torch.cuda`` learns in which order they wait."""
        super().__init__()
        self._cuda = cuda
        self._device = cuda.current_device() if device.index is None else device.index
        self._key = _torch_private.current_stream_key if cuda is torch.cuda else cuda.current_stream
        # High priority: a collective that waits behind compute kernels delays the compute that waits for it.
        self._gather_stream = cuda.Stream(device, priority=-1)
        self._reduce_stream = cuda.Stream(device, priority=-1)
        # The last use of each unit. An event may be recorded again while waits on its last recording are still
        # queued, so one event a unit is enough.
        self._used: dict[FlatBuffer, torch.cuda.Event] = {}
        self._arriving: dict[FlatBuffer, _Arrival] = {}
        # One event a stream that used gathered memory: the latest covers the earlier ones of the same stream.
        self._released: dict[int, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._filled = cuda.Event()
        # Where compute was ordered after everything, until gathers are ordered after that.
        self._drained_on: torch.cuda.Stream | None = None
        self._spare: list[torch.cuda.Event] = []
        self._seen: dict[Hashable, torch.cuda.Stream] = {}
        # Whether each stream has work that compute was not ordered after. A stream joins the capture of a CUDA graph by
        # its first use in it, and waiting for one that has not joined is an error.
        self._gathers = self._reduces = False

    @override
    def clock(self) -> Clock:
        return StreamClock(torch.device("cuda", self._device))

    @override
    def begin_forward(self) -> None:
        current = self._current()
        self._gather_stream.wait_stream(current)
        self._gathers = True
        # Releases of a training step are behind this stream by now (drain). Waiting for their events again would also
        # forbid capturing the step in a CUDA graph, inside which no earlier event may be waited for.
        for stream, _ in self._released.values():
            # Another forward ran there, which nothing here had to wait for. A capture begins with an idle device.
            if stream is not current and not self._cuda.is_current_stream_capturing():
                self._gather_stream.wait_stream(stream)
        self._released.clear()
        self._drained_on = None

    @override
    def gather(self, units: Sequence[Gatherable]) -> None:
        stream = self._gather_stream
        self._gathers = True
        if self._drained_on is not None:
            # A backward behind another one: no forward came between.
            stream.wait_stream(self._drained_on)
            self._drained_on = None
        for _, event in self._released.values():
            event.wait(stream)
        self._released.clear()
        before = self._current()
        self._cuda.set_stream(stream)
        try:
            for unit in units:
                with allocation_of(unit):
                    unit.buffer.attach()
            for work in start_masters(units):
                work.wait()
            for work in start_gathers(units):
                work.wait()
            for unit in units:
                end_gather(unit)
            event = self._spare.pop() if self._spare else self._cuda.Event()
            event.record(stream)
        finally:
            self._cuda.set_stream(before)
        arrival = _Arrival(event, len(units))
        for unit in units:
            if unit.buffer in self._arriving:
                self._expect_no_more(unit)
            self._arriving[unit.buffer] = arrival

    @override
    def arrive(self, unit: Gatherable) -> None:
        arrival = self._arriving.get(unit.buffer)
        if arrival is None:
            return
        current = self._current()
        # On the stream that another unit of the batch arrived on, there is nothing left to wait for.
        if arrival.on != current.cuda_stream:
            if self.waits is not None:
                self.waits.mark()
            arrival.event.wait(current)
            if self.waits is not None:
                self.waits.mark()
            arrival.on = current.cuda_stream
        self._expect_no_more(unit)

    @override
    def follow(self) -> None:
        # No event is left to wait for: that of a gather is recorded anew once all of its units have arrived.
        if self._gathers:
            self._current().wait_stream(self._gather_stream)

    def _expect_no_more(self, unit: Gatherable) -> None:
        arrival = self._arriving.pop(unit.buffer)
        arrival.missing -= 1
        if not arrival.missing:
            # Recorded again only now: a wait is for the latest recording at the time it is issued.
            self._spare.append(arrival.event)

    @override
    def release(self, unit: Gatherable) -> None:
        if unit.buffer in self._arriving:
            self._expect_no_more(unit)
        current = self._current()
        event = self._used.get(unit.buffer)
        if event is None:
            event = self._used[unit.buffer] = self._cuda.Event()
        event.record(current)
        self._released[current.cuda_stream] = current, event
        for stream in _others(unit.places, current):
            self._released[stream.cuda_stream] = stream, stream.record_event()
        unit.buffer.release()

    @override
    def keep(self, unit: Gatherable, part: SecondaryShard) -> None:
        if unit.buffer in self._arriving:
            self._expect_no_more(unit)
        # Beside compute, and both memories are of one stream's pool: the next gather reads the one and may take the
        # other, without a word to compute.
        stream, current = self._gather_stream, self._current()
        self._gathers = True
        for place in (current, *_others(unit.places, current)):
            stream.wait_stream(place)
        self._cuda.set_stream(stream)
        try:
            part.fill()
        finally:
            self._cuda.set_stream(current)
        unit.buffer.release()

    @override
    def reduce(self, reduction: Reduction, taken_at: Sequence[object]) -> None:
        before, stream = self._current(), self._reduce_stream
        self._reduces = True
        self._filled.record(before)
        self._filled.wait(stream)
        event = self._spare.pop() if self._spare else self._cuda.Event()
        self._cuda.set_stream(stream)
        written: object = None
        try:
            reduction.issue().wait()
            written = reduction.deliver()
            event.record(stream)
        finally:
            self._cuda.set_stream(before)
            self._reductions.append((event, (before, *_others(taken_at, before)), reduction.retire, written))

    @override
    def drain(self) -> None:
        super().drain()
        current = self._current()
        for _, event in self._released.values():
            event.wait(current)
        self._released.clear()
        if self.waits is not None:
            self.waits.mark()
        if self._reduces:
            current.wait_stream(self._reduce_stream)
        if self._gathers:
            # Gathers that nothing used (a wrong prefetch) must not write memory that compute gets next.
            current.wait_stream(self._gather_stream)
        if self.waits is not None:
            self.waits.mark()
        self._gathers = self._reduces = False
        self._drained_on = current

    @override
    def busy(self) -> bool:
        return not (self._gather_stream.query() and self._reduce_stream.query())

    @override
    def current(self) -> object:
        return self._current()

    @override
    def between(self, places: Sequence[object]) -> AbstractContextManager[Any]:
        current = self._current()
        others = _others(places, current)
        return _joined(current, others) if others else _HERE

    def _current(self) -> torch.cuda.Stream:
        # Asked some six times a unit and step: making an object for each answer takes most of what asking takes.
        key = self._key(self._device)
        stream = self._seen.get(key)
        if stream is None:
            stream = self._seen[key] = self._cuda.current_stream(self._device)
        return stream

    @override
    def _retire_oldest(self) -> None:
        event, takers, retire, _written = self._reductions.popleft()
        if self.waits is not None:
            self.waits.mark()
        for stream in takers:
            # Not the current one: the memory released next returns to the pools of these.
            event.wait(stream)
        if self.waits is not None:
            self.waits.mark()
        self._spare.append(event)
        retire()


@dataclass(eq=False, slots=True)
class _Arrival:
    """The end of a gather on its stream."""

    event: torch.cuda.Event
    missing: int
    """How many units still have to arrive there."""
    on: int | None = None
    """The stream that was last ordered after it."""


def _others(places: Iterable[Any], current: torch.cuda.Stream) -> list[torch.cuda.Stream]:
    return [place for place in places if place is not current and place is not None]


@contextmanager
def _joined(current: torch.cuda.Stream, others: Sequence[torch.cuda.Stream]) -> Iterator[None]:
    for stream in others:
        current.wait_stream(stream)
    yield
    for stream in others:
        # The memory that was read here returns to their pools.
        stream.wait_stream(current)


class Waits:
    """Measures how long compute waits for other ranks, from its making until ``stop``."""

    def __init__(self, streams: CommStreams) -> None:
        self._streams = streams
        self._clock = streams.clock()
        #: Forwards that began meanwhile. A step that a CUDA graph replays begins none, and its waits are not seen.
        self.forwards = 0
        # Where waits begin and end, in turns.
        self._marks: list[Any] = []
        self._first = self._last = self._clock.stamp()
        streams.waits = self

    def begin_forward(self) -> None:
        """A forward begins."""
        # Captured operations do not run.
        self.forwards += self._clock.runs

    def mark(self) -> None:
        """Compute waits for other ranks from here on, or has waited since the last mark."""
        if self._clock.runs:
            self._marks.append(self._clock.stamp())

    def stop(self) -> None:
        """Measure no more."""
        self._last = self._clock.stamp()
        self._streams.waits = None

    def read(self) -> tuple[float, float]:
        """Seconds that were not spent waiting for other ranks, at least 0, and seconds altogether.

        Blocks until the device has reached ``stop``.
        """
        clock = self._clock
        clock.wait(self._last)
        wall = clock.microseconds(self._first, self._last)
        # Two streams that waited at once are counted twice.
        stalled = sum(map(clock.microseconds, self._marks[::2], self._marks[1::2]))
        return max(0.0, wall - stalled) / 1e6, wall / 1e6
