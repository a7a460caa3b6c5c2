"""One traced step, and how much of its communication is exposed."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from ._trace_intervals import Interval, length, union, without


class Lane(enum.StrEnum):
    """What the spans of a step are made of."""

    GATHER = "gather"
    COMPUTE = "compute"
    WAIT = "wait"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Span:
    """One gather, forward, backward or reduction of one unit, or one time in which the stream that computes waits."""

    lane: Lane
    unit: str
    """Fully-qualified name of the unit's module; ``(root)`` for the outermost. Of a wait: whose gather it is for, or
    for the room of whose reduction."""
    start_us: float
    """Microseconds from the step's begin."""
    end_us: float
    """Microseconds from the step's begin."""
    backward: bool
    """Of compute: whether it is the unit's backward, or a forward that is repeated in one. False of other lanes."""
    nbytes: int
    """Bytes of the whole unit, padding included, in ``dtype``."""
    dtype: str
    """The dtype of the unit's parameters as the user made them, such as ``float32``; what travels may be narrower."""
    finished: bool = True
    """Whether its end was seen. One that is not finished ends with the step, and counts as no time."""

    @property
    def interval(self) -> Interval:
        """Begin and end, in microseconds."""
        return self.start_us, self.end_us


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What memory was taken when the host had issued everything up to one point of the step."""

    at_us: float
    """Microseconds from the step's begin."""
    gathered: int
    """Bytes of the gather buffers alive, in the dtypes in which the user made the parameters."""
    allocated: int | None = None
    """Bytes of all tensors on the device, from its caching allocator. None on the CPU."""
    reserved: int | None = None
    """Bytes that the caching allocator holds. None on the CPU."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """What one rank's units did in one step: an outermost forward and what follows until its backward has ended."""

    step: int
    """Number of the step, from 1."""
    rank: int
    device: str
    duration_us: float
    """Microseconds from the begin of the forward to the end of the backward; on a CUDA device, of device time."""
    spans: tuple[Span, ...]
    """In the order in which they were issued."""
    memory: tuple[MemorySample, ...]
    """In the order of time."""

    def of(self, lane: Lane) -> tuple[Span, ...]:
        """The spans of ``lane``."""
        return tuple(span for span in self.spans if span.lane is lane)

    @property
    def communication(self) -> list[Interval]:
        """When a gather or a reduction runs."""
        return union(self._finished(Lane.GATHER, Lane.REDUCE))

    @property
    def compute(self) -> list[Interval]:
        """When a unit computes, and does not wait."""
        return without(self._finished(Lane.COMPUTE), self._finished(Lane.WAIT))

    @property
    def exposed(self) -> list[Interval]:
        """When communication runs and no unit computes."""
        return without(self.communication, self.compute)

    @property
    def exposed_us(self) -> float:
        """Microseconds in which communication runs and no unit computes."""
        return length(self.exposed)

    @property
    def exposed_share(self) -> float:
        """``exposed_us`` over ``duration_us``."""
        return self.exposed_us / self.duration_us if self.duration_us > 0 else 0.0

    def _finished(self, *streams: Lane) -> list[Interval]:
        return [span.interval for span in self.spans if span.finished and span.lane in streams]


def innermost(spans: Iterable[Span]) -> list[Span]:
    """The spans that hold no span of another unit."""
    # Of two that begin together, the one that ends later holds the other; of two equal ones, the first issued.
    ordered = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
    found = []
    for position, span in enumerate(ordered):
        for inner in ordered[position + 1 :]:
            if inner.start_us >= span.end_us:
                found.append(span)
                break
            if inner.end_us <= span.end_us and inner.unit != span.unit:
                break
        else:
            found.append(span)
    return found


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """``spans`` in rows, such that two of one row are apart or one holds the other.

    Viewers draw nothing else in one row. Operations of one stream need one row; on the host, several are under way.
    """
    made: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):
        for still_open in open_spans:
            while still_open and still_open[-1].end_us <= span.start_us:
                still_open.pop()
        fitting = (row for row, above in enumerate(open_spans) if not above or span.end_us <= above[-1].end_us)
        row = next(fitting, len(made))
        if row == len(made):
            made.append([])
            open_spans.append([])
        made[row].append(span)
        open_spans[row].append(span)
    return made
