"""How long a step takes: streams that run beside each other, and wait for each other's events."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .device import Device
from .links import LinkModel
from .recording import Begin, Issued, Kernel, Part, Signal, Stream, Transfer, Unit, Wait

#: By which part of its own time a kernel beside compute delays it: both want the same memory and multiprocessors.
_KERNEL_INTERFERENCE = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that runs."""

    stream: Stream
    begin_s: float
    end_s: float
    name: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes, in seconds."""

    device_s: float
    """Until everything has run, on a device that never waits for the host."""
    parts_s: Mapping[Part, float]
    """The same, by part: compute's own and what it waits for."""
    busy_s: Mapping[Stream, float]
    """How long each stream has something to run. Compute's contains what others delay it by."""
    delayed_s: float
    """By which work on other streams slows compute down."""
    waited_s: float
    """How long compute waits for other streams."""
    launches: int
    """Kernels and collectives that the host launches."""
    units: int
    """Gathers and reductions of one unit, however many go in a launch."""
    host_s: float
    """What issuing all of it takes the host; a step that is one CUDA graph does not have it."""
    flops: int
    """Of matrix products and attention."""
    issued_at: tuple[tuple[int, Interval], ...]
    """When what was issued runs: its index among what was issued, and its interval."""

    @property
    def total_s(self) -> float:
        """The step, launched one by one: the device's time or the host's, whichever is longer."""
        return max(self.device_s, self.host_s)


def timed(issued: Sequence[Issued], device: Device, links: LinkModel) -> StepTime:
    """Run what was ``issued`` on a pretended clock.

    Raises:
        ConfigError: ``links`` do not know a group of ranks.
    """
    clock = _Clock(device, links)
    for index, each in enumerate(issued):
        clock.run(index, each)
    return clock.result()


class _Clock:
    def __init__(self, device: Device, links: LinkModel) -> None:
        self._device = device
        self._links = links
        self._now = dict.fromkeys(Stream, 0.0)
        self._busy = dict.fromkeys(Stream, 0.0)
        self._events: dict[int, float] = {}
        self._begins: list[tuple[Part, float]] = []
        # What runs beside compute: from, to, and by which part of it compute is delayed.
        self._beside: deque[tuple[float, float, float]] = deque()
        self._delayed = self._waited = 0.0
        self._launches = self._flops = self._units = 0
        self._intervals: list[tuple[int, Interval]] = []

    def run(self, index: int, each: Issued) -> None:
        """``each``, the ``index``-th of all, is issued."""
        if isinstance(each, Kernel):
            self._launches += 1
            self._flops += each.flops if each.unit is not Unit.NONE else 0
            self._take(index, each.stream, self._device.seconds(each), _KERNEL_INTERFERENCE, each.name)
        elif isinstance(each, Transfer):
            self._launches += 1
            self._units += each.members
            link = self._links.link(each.operation, each.span)
            seconds = self._links.seconds(each.operation, each.nbytes, each.span, each.members)
            self._take(index, each.stream, seconds, link.interference, each.operation.value)
        elif isinstance(each, Signal):
            self._events[each.event] = self._now[each.stream]
        elif isinstance(each, Wait):
            # What came before the step has run.
            until = self._events.get(each.event, 0.0)
            if each.stream is Stream.COMPUTE:
                self._waited += max(0.0, until - self._now[each.stream])
            self._now[each.stream] = max(self._now[each.stream], until)
        elif isinstance(each, Begin):
            self._begins.append((each.part, self._now[Stream.COMPUTE]))

    def result(self) -> StepTime:
        """What all of it took."""
        end = max(self._now.values())
        ends = [begin for _, begin in self._begins[1:]] + [end]
        parts: dict[Part, float] = {}
        for (part, begin), until in zip(self._begins, ends, strict=True):
            parts[part] = parts.get(part, 0.0) + until - begin
        return StepTime(
            device_s=end,
            parts_s=parts,
            busy_s=dict(self._busy),
            delayed_s=self._delayed,
            waited_s=self._waited,
            launches=self._launches,
            units=self._units,
            host_s=self._launches * self._device.launch_s + self._units * self._device.unit_s,
            flops=self._flops,
            issued_at=tuple(self._intervals),
        )

    def _take(self, index: int, stream: Stream, seconds: float, interference: float, name: str) -> None:
        begin = self._now[stream]
        if stream is Stream.COMPUTE:
            delay = self._delay(begin, begin + seconds)
            self._delayed += delay
            seconds += delay
        else:
            self._beside.append((begin, begin + seconds, interference))
        self._now[stream] = begin + seconds
        self._busy[stream] += seconds
        self._intervals.append((index, Interval(stream, begin, begin + seconds, name)))

    def _delay(self, begin: float, end: float) -> float:
        while self._beside and self._beside[0][1] <= begin:
            self._beside.popleft()
        return sum(part * max(0.0, min(end, to) - max(begin, since)) for since, to, part in self._beside)
