"""The engine's streams, without a device: what ``CudaStreams`` orders by events is noted."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.gather import Gatherable
from ..runtime.streams import HostStreams, Reduction
from .recording import Recorder, Stream


class NotedStreams(HostStreams):
    """Runs everything where it is issued, as ``HostStreams`` does, and notes on which stream a device would run it.

    Memory comes and goes as with streams: a reduction is delivered when it is issued, and its input let go of when
    compute would have been ordered behind it.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._arriving: dict[Gatherable, int] = {}
        # The last use of gathered memory since the gather stream was ordered behind compute.
        self._released: int | None = None

    def begin_forward(self) -> None:
        self._released = None
        self._order(Stream.COMPUTE, Stream.GATHER)

    def gather(self, units: Sequence[Gatherable]) -> None:
        if self._released is not None:
            self._recorder.wait(Stream.GATHER, self._released)
            self._released = None
        with self._recorder.on(Stream.GATHER):
            super().gather(units)
        event = self._recorder.signal(Stream.GATHER)
        for unit in units:
            self._arriving[unit] = event

    def arrive(self, unit: Gatherable) -> None:
        event = self._arriving.pop(unit, None)
        if event is not None:
            self._recorder.wait(Stream.COMPUTE, event)
        super().arrive(unit)

    def release(self, unit: Gatherable) -> None:
        super().release(unit)
        self._released = self._recorder.signal(Stream.COMPUTE)

    def reduce(self, reduction: Reduction, taken_at: Sequence[object]) -> None:
        self._order(Stream.COMPUTE, Stream.REDUCE)
        with self._recorder.on(Stream.REDUCE):
            reduction.issue().wait()
            reduction.deliver()
        self._reductions.append((self._recorder.signal(Stream.REDUCE), reduction.retire))

    def drain(self) -> None:
        super().drain()
        for stream in (Stream.REDUCE, Stream.GATHER):
            self._order(stream, Stream.COMPUTE)

    def give_up(self) -> None:
        self.drain()

    def _retire_oldest(self) -> None:
        event, retire = self._reductions.popleft()
        self._recorder.wait(Stream.COMPUTE, event)
        retire()

    def _order(self, first: Stream, then: Stream) -> None:
        self._recorder.wait(then, self._recorder.signal(first))
