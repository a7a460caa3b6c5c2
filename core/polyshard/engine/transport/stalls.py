"""How long a rank's compute stood still for other ranks: what is left of a step is the rank's own time.

[Note: a rank's own time]
Ranks that train together take the same time for a step, whichever of them is slow: the others wait for it at the next
communication. What tells them apart is how long each waited. On the host that is the time inside of calls that block;
on streams it is what lies between an event in front of a wait and one behind it, read long after both were recorded.
Transfers that take longer than what they are hidden behind count as waiting, too, on all ranks alike.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Of what was measured, in seconds."""

    wall_s: float
    own_s: float
    """Without what was spent waiting for other ranks; at least 0."""


class Stalls(ABC):
    """Measures from its construction to ``stop``. ``Lanes`` tell it of their waits meanwhile."""

    def __init__(self) -> None:
        #: Forwards that began meanwhile. A step that a CUDA graph replays begins none, and its waits are not seen.
        self.forwards = 0

    def begin_forward(self) -> None:
        """A forward begins."""
        self.forwards += 1

    @abstractmethod
    def wait(self) -> None:
        """Compute waits for other ranks from here on."""

    @abstractmethod
    def waited(self) -> None:
        """The wait that ``wait`` began has ended."""

    @abstractmethod
    def stop(self) -> None:
        """What follows is not measured."""

    @abstractmethod
    def read(self) -> Times:
        """What was measured. Blocks until the device has got as far as ``stop``."""


class HostStalls(Stalls):
    """For waits that block the host."""

    def __init__(self) -> None:
        super().__init__()
        self._stalled = 0.0
        self._waits_since = 0.0
        self._begun = time.monotonic()
        self._wall = 0.0

    def wait(self) -> None:
        self._waits_since = time.monotonic()

    def waited(self) -> None:
        self._stalled += time.monotonic() - self._waits_since

    def stop(self) -> None:
        self._wall = time.monotonic() - self._begun

    def read(self) -> Times:
        return Times(self._wall, max(0.0, self._wall - self._stalled))


class StreamStalls(Stalls):
    """For waits of CUDA streams, seen from the stream that is current at each."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[torch.cuda.Event] = []
        self._first = self._last = _mark()

    def begin_forward(self) -> None:
        # What is captured does not run.
        if not torch.cuda.is_current_stream_capturing():
            super().begin_forward()

    def wait(self) -> None:
        # An event of a capture belongs to the graph: it is never reached here.
        if not torch.cuda.is_current_stream_capturing():
            self._marks.append(_mark())

    waited = wait

    def stop(self) -> None:
        self._last = _mark()

    def read(self) -> Times:
        self._last.synchronize()
        wall = self._first.elapsed_time(self._last)
        pairs = zip(self._marks[::2], self._marks[1::2], strict=False)
        # Two streams that waited at once are counted twice.
        stalled = sum(before.elapsed_time(behind) for before, behind in pairs)
        return Times(wall / 1000, max(0.0, wall - stalled) / 1000)


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
