"""The streams of a step without a device: what ``CudaStreams`` orders by events is reported to a recorder."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ..runtime.buffers import FlatBuffer, PostForwardShard
from ..runtime.gather import Gatherable
from ..runtime.streams import HostStreams, Reduction


class Stream(enum.Enum):
    """Where a device would run an operation."""

    COMPUTE = "compute"
    """The model's own operations, and the optimizer's."""
    GATHER = "gather"
    """Casts into gather buffers, and gathers."""
    REDUCE = "reduce"
    """Copies of gradients, and reductions."""


class StreamRecorder(Protocol):
    """Learns on which stream operations are issued, and which stream waits for which."""

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Operations inside are issued on ``stream``; outside of any, on ``COMPUTE``."""
        ...

    def signal(self, stream: Stream) -> int:
        """Record an event on ``stream``; returns its number."""
        ...

    def wait(self, stream: Stream, event: int) -> None:
        """``stream`` waits for ``event``."""
        ...


class RecordedStreams(HostStreams):
    """Runs everything where it is issued, as ``HostStreams`` does, and reports the stream that a device would take.

    Memory is taken and released as with streams: a reduction is delivered when it is issued, and its input released
    when compute would have been ordered behind it.
    """

    def __init__(self, streams: StreamRecorder) -> None:
        super().__init__()
        self._streams = streams
        self._arriving: dict[FlatBuffer, int] = {}
        # The last use of gathered memory since the gather stream was ordered behind compute.
        self._released: int | None = None

    def begin_forward(self) -> None:
        self._released = None
        self._order(Stream.COMPUTE, Stream.GATHER)

    def gather(self, units: Sequence[Gatherable]) -> None:
        if self._released is not None:
            self._streams.wait(Stream.GATHER, self._released)
            self._released = None
        with self._streams.on(Stream.GATHER):
            super().gather(units)
        event = self._streams.signal(Stream.GATHER)
        self._arriving.update(dict.fromkeys((unit.buffer for unit in units), event))

    def arrive(self, unit: Gatherable) -> None:
        event = self._arriving.pop(unit.buffer, None)
        if event is not None:
            self._streams.wait(Stream.COMPUTE, event)
        super().arrive(unit)

    def release(self, unit: Gatherable) -> None:
        super().release(unit)
        self._released = self._streams.signal(Stream.COMPUTE)

    def keep(self, unit: Gatherable, part: PostForwardShard) -> None:
        self._order(Stream.COMPUTE, Stream.GATHER)
        with self._streams.on(Stream.GATHER):
            super().keep(unit, part)

    def reduce(self, reduction: Reduction, taken_at: Sequence[object]) -> None:
        self._order(Stream.COMPUTE, Stream.REDUCE)
        with self._streams.on(Stream.REDUCE):
            reduction.issue().wait()
            reduction.deliver()
        self._reductions.append((self._streams.signal(Stream.REDUCE), reduction.retire))

    def drain(self) -> None:
        super().drain()
        for stream in (Stream.REDUCE, Stream.GATHER):
            self._order(stream, Stream.COMPUTE)

    def give_up(self) -> None:
        self.drain()

    def _retire_oldest(self) -> None:
        event, retire = self._reductions.popleft()
        self._streams.wait(Stream.COMPUTE, event)
        retire()

    def _order(self, first: Stream, then: Stream) -> None:
        self._streams.wait(then, self._streams.signal(first))
