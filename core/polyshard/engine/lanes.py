"""On which streams a step's gathers, compute and reductions run, and what waits for what.

[Note: ordering without blocking the host]
Gathers run on one stream, reductions on another, compute on the caller's. Memory is handed from one to the next by
events only:

1. A gather writes after every event recorded by a reshard: the memory that it reuses was last read by compute.
2. Compute waits for the event of the one gather whose parameters it is about to use.
3. A reduction reads after compute has filled its input, and its input goes back to compute's memory pool after compute
   has been ordered behind the reduction. Two reductions are in flight at most.
4. At the start of a forward the gather stream waits for compute: the optimizer has then written the masters.
5. At the end of a backward compute waits for the reductions: the optimizer may then read the gradients.

On the host's own device operations run in the order in which they are issued, and only ``Work.wait`` blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ..interfaces import Collectives, Work
from .buffer import FlatBuffer

#: Reductions whose input buffers may be alive at once; one more would wait for the first.
REDUCTIONS_IN_FLIGHT = 2


class Gatherable(Protocol):
    """What lanes need of a unit."""

    buffer: FlatBuffer

    @property
    def allocation(self) -> AbstractContextManager[Any]:
        """The backend's memory for gathers."""

    def fill(self) -> Work:
        """Write the own slice and start the gather."""


class Lanes(ABC):
    """Runs gathers and reductions beside compute. One instance serves all units of a root."""

    @abstractmethod
    def begin_forward(self) -> None:
        """Order gathers after what was issued so far (rule 4)."""

    @abstractmethod
    def gather(self, unit: Gatherable) -> None:
        """Issue the gather of ``unit``."""

    @abstractmethod
    def arrive(self, unit: Gatherable) -> None:
        """Order compute after the gather of ``unit`` (rule 2)."""

    @abstractmethod
    def release(self, unit: Gatherable) -> None:
        """Give the gather buffer's memory back (rule 1)."""

    @abstractmethod
    def reduce(self, issue: Callable[[], Work], deliver: Callable[[], None], retire: Callable[[], None]) -> None:
        """Run a reduction.

        ``issue`` starts it, ``deliver`` uses its result, ``retire`` lets go of its input; in that order.
        """

    @abstractmethod
    def drain(self) -> None:
        """Order compute after every reduction, and retire them (rule 5)."""


class HostLanes(Lanes):
    """For operations that run where they are issued, or on a backend's own threads until ``Work.wait``."""

    def __init__(self) -> None:
        self._gathers: dict[Gatherable, Work] = {}
        self._reductions: deque[tuple[Work, Callable[[], None], Callable[[], None]]] = deque()

    def begin_forward(self) -> None:
        return None

    def gather(self, unit: Gatherable) -> None:
        unit.buffer.attach()
        self._gathers[unit] = unit.fill()

    def arrive(self, unit: Gatherable) -> None:
        work = self._gathers.pop(unit, None)
        if work is not None:
            work.wait()

    def release(self, unit: Gatherable) -> None:
        self.arrive(unit)
        unit.buffer.release()

    def reduce(self, issue: Callable[[], Work], deliver: Callable[[], None], retire: Callable[[], None]) -> None:
        self._reductions.append((issue(), deliver, retire))
        if len(self._reductions) > REDUCTIONS_IN_FLIGHT:
            self._finish_oldest()

    def drain(self) -> None:
        while self._reductions:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, deliver, retire = self._reductions.popleft()
        work.wait()
        deliver()
        retire()


class StreamLanes(Lanes):
    """For CUDA and stream-ordered collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority: a collective that waits behind compute kernels delays the compute that waits for it.
        self._gather_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._reduce_stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        # (gathered, last used) of each unit. An event may be recorded again while waits on its last recording are still
        # queued, so two a unit serve for good.
        self._events: dict[Gatherable, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self._arriving: set[Gatherable] = set()
        # One event a stream that used gathered memory: the latest covers the earlier ones of the same stream.
        self._released: dict[int, torch.cuda.Event] = {}
        self._reductions: deque[tuple[torch.cuda.Event, Callable[[], None]]] = deque()

    def begin_forward(self) -> None:
        self._gather_stream.wait_stream(torch.cuda.current_stream(self._device))
        # Releases are behind this stream by now (drain). Waiting for their events again would also forbid capturing the
        # step in a CUDA graph, inside which no earlier event may be waited for.
        self._released.clear()

    def gather(self, unit: Gatherable) -> None:
        stream = self._gather_stream
        for event in self._released.values():
            stream.wait_event(event)
        self._released.clear()
        with torch.cuda.stream(stream), unit.allocation:
            unit.buffer.attach()
            unit.fill().wait()
            self._events_of(unit)[0].record(stream)
        self._arriving.add(unit)

    def arrive(self, unit: Gatherable) -> None:
        if unit in self._arriving:
            self._arriving.discard(unit)
            torch.cuda.current_stream(self._device).wait_event(self._events_of(unit)[0])

    def release(self, unit: Gatherable) -> None:
        self._arriving.discard(unit)
        current = torch.cuda.current_stream(self._device)
        event = self._events_of(unit)[1]
        event.record(current)
        self._released[current.cuda_stream] = event
        unit.buffer.release()

    def reduce(self, issue: Callable[[], Work], deliver: Callable[[], None], retire: Callable[[], None]) -> None:
        if len(self._reductions) >= REDUCTIONS_IN_FLIGHT:
            self._retire_oldest()
        self._reduce_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._reduce_stream):
            issue().wait()
            deliver()
            event = _event()
            event.record(self._reduce_stream)
        self._reductions.append((event, retire))

    def drain(self) -> None:
        while self._reductions:
            self._retire_oldest()
        current = torch.cuda.current_stream(self._device)
        for event in self._released.values():
            current.wait_event(event)
        self._released.clear()
        current.wait_stream(self._reduce_stream)
        # Gathers that nothing used (a wrong prefetch) must not write memory that compute gets next.
        current.wait_stream(self._gather_stream)

    def _events_of(self, unit: Gatherable) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        events = self._events.get(unit)
        if events is None:
            events = self._events[unit] = (_event(), _event())
        return events

    def _retire_oldest(self) -> None:
        event, retire = self._reductions.popleft()
        torch.cuda.current_stream(self._device).wait_event(event)
        retire()


def lanes_for(collectives: Collectives) -> Lanes:
    """What suits ``collectives``: streams where its operations are ordered by them."""
    if collectives.capabilities.stream_ordered and collectives.device.type == "cuda":
        return StreamLanes(collectives.device)
    return HostLanes()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
