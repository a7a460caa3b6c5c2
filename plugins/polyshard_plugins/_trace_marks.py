"""Records when the operations of one step begin and end, and makes a ``StepTrace`` of it afterwards."""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
from polyshard.interfaces import UnitSpec

from .trace_step import Lane, MemorySample, Span, StepTrace


class Memory(NamedTuple):
    """What the allocator of a device says."""

    allocated: int
    reserved: int


class Clock(ABC):
    """Takes stamps of the current point of a step, which can be read once the step has got there."""

    @abstractmethod
    def stamp(self) -> Any:
        """The current point. Must not synchronize with the device."""

    @abstractmethod
    def passed(self, stamp: Any) -> bool:
        """Whether the device has got to ``stamp``."""

    @abstractmethod
    def wait(self, stamp: Any) -> None:
        """Block until the device has got to ``stamp``."""

    @abstractmethod
    def microseconds(self, first: Any, then: Any) -> float:
        """From ``first`` to ``then``, both of which have passed."""

    @abstractmethod
    def memory(self) -> Memory | None:
        """Memory taken now; None where there is no allocator to ask."""

    @property
    @abstractmethod
    def orders_lanes(self) -> bool:
        """Whether stamps taken later are later, whatever they are of."""


class HostClock(Clock):
    """For operations that run on the host, or that the host waits for."""

    orders_lanes = True

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def passed(self, stamp: int) -> bool:
        return True

    def wait(self, stamp: int) -> None:
        return None

    def microseconds(self, first: int, then: int) -> float:
        return (then - first) / 1000

    def memory(self) -> None:
        return None


class StreamClock(Clock):
    """For CUDA: timing events on whichever stream is current."""

    orders_lanes = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())  # type: ignore[no-untyped-call]

    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    def microseconds(self, first: torch.cuda.Event, then: torch.cuda.Event) -> float:
        return 1000 * float(first.elapsed_time(then))

    def memory(self) -> Memory:
        # One call: each of memory_allocated() and memory_reserved() makes and flattens the whole dictionary again.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return Memory(stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"])


class Kind(enum.Enum):
    """What a mark marks: the method of the observer that was called."""

    UNSHARD = enum.auto()
    UNSHARDED = enum.auto()
    COMPUTE = enum.auto()
    COMPUTED = enum.auto()
    WAIT = enum.auto()
    WAITED = enum.auto()
    REDUCE = enum.auto()
    REDUCED = enum.auto()
    RESHARD = enum.auto()


_BEGINS = {
    Kind.UNSHARD: Lane.GATHER,
    Kind.COMPUTE: Lane.COMPUTE,
    Kind.WAIT: Lane.WAIT,
    Kind.REDUCE: Lane.REDUCE,
}
_ENDS = {
    Kind.UNSHARDED: Lane.GATHER,
    Kind.COMPUTED: Lane.COMPUTE,
    Kind.WAITED: Lane.WAIT,
    Kind.REDUCED: Lane.REDUCE,
}


class Mark(NamedTuple):
    """One call of an observer."""

    kind: Kind
    unit: UnitSpec
    backward: bool
    stamp: Any
    memory: Memory | None


class Recording:
    """The marks of one step, from the moment when it is made."""

    def __init__(self, step: int, rank: int, device: torch.device, clock: Clock) -> None:
        self._step = step
        self._rank = rank
        self._device = device
        self._clock = clock
        self._marks: list[Mark] = []
        self._begin = clock.stamp()
        self._memory_at_begin = clock.memory()
        self._end: Any = None
        self._memory_at_end: Memory | None = None

    def mark(self, kind: Kind, unit: UnitSpec, backward: bool = False) -> None:
        """The operation gets to this point of the current stream."""
        self._marks.append(Mark(kind, unit, backward, self._clock.stamp(), None))

    def mark_with_memory(self, kind: Kind, unit: UnitSpec, backward: bool = False) -> None:
        """The same, and how much memory is taken."""
        self._marks.append(Mark(kind, unit, backward, self._clock.stamp(), self._clock.memory()))

    def end(self) -> None:
        """The step ends at this point of the current stream."""
        self._end = self._clock.stamp()
        self._memory_at_end = self._clock.memory()

    @property
    def complete(self) -> bool:
        """Whether the device has got to every mark."""
        # The last ones first: those that are still to come are among them.
        return self._clock.passed(self._end) and all(self._clock.passed(mark.stamp) for mark in reversed(self._marks))

    def wait(self) -> None:
        """Block until the device has got to every mark."""
        for mark in self._marks:
            self._clock.wait(mark.stamp)
        self._clock.wait(self._end)

    def trace(self) -> StepTrace:
        """What the marks say. To be called once they are complete."""
        times = [self._clock.microseconds(self._begin, mark.stamp) for mark in self._marks]
        duration = self._clock.microseconds(self._begin, self._end)
        return StepTrace(
            step=self._step,
            rank=self._rank,
            device=str(self._device),
            duration_us=duration,
            spans=tuple(self._spans(times, duration)),
            memory=tuple(self._samples(times, duration)),
        )

    def _spans(self, times: list[float], duration: float) -> list[Span]:
        begun: dict[tuple[Lane, UnitSpec, bool], deque[int]] = defaultdict(deque)
        ended: dict[int, float] = {}
        for position, mark in enumerate(self._marks):
            if (lane := _BEGINS.get(mark.kind)) is not None:
                begun[lane, mark.unit, mark.backward].append(position)
            elif (lane := _ENDS.get(mark.kind)) is not None:
                open_ones = begun[lane, mark.unit, mark.backward]
                if open_ones:
                    # A recomputation ends before the backward that holds it; gathers and reductions end in order.
                    ended[open_ones.pop() if lane is Lane.COMPUTE else open_ones.popleft()] = times[position]
        return [
            Span(
                lane=_BEGINS[mark.kind],
                unit=mark.unit.label,
                start_us=times[position],
                end_us=ended.get(position, max(duration, times[position])),
                backward=mark.backward,
                nbytes=_nbytes(mark.unit),
                dtype=str(mark.unit.master_dtype).removeprefix("torch."),
                finished=position in ended,
            )
            for position, mark in enumerate(self._marks)
            if mark.kind in _BEGINS
        ]

    def _samples(self, times: list[float], duration: float) -> list[MemorySample]:
        """One for each mark that has memory: those of one stream, since it reaches them in the order of issue.

        A clock that orders all lanes has one for every mark.
        """
        samples = [_sample(0.0, 0, self._memory_at_begin)]
        gathered: dict[UnitSpec, int] = {}
        for mark, at in zip(self._marks, times, strict=True):
            if mark.kind is Kind.UNSHARD:
                gathered[mark.unit] = _nbytes(mark.unit)
            elif mark.kind is Kind.RESHARD:
                gathered.pop(mark.unit, None)
            if self._clock.orders_lanes or mark.memory is not None:
                samples.append(_sample(at, sum(gathered.values()), mark.memory))
        samples.append(_sample(duration, sum(gathered.values()), self._memory_at_end))
        return samples


def _sample(at: float, gathered: int, memory: Memory | None) -> MemorySample:
    if memory is None:
        return MemorySample(at, gathered)
    return MemorySample(at, gathered, memory.allocated, memory.reserved)


def _nbytes(unit: UnitSpec) -> int:
    return unit.numel * unit.master_dtype.itemsize
