"""The contract of listeners, which watch steps without taking part in them."""

from __future__ import annotations

import enum
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from .units import UnitSpec


class UnitOperation(enum.StrEnum):
    """What a unit does in a step."""

    GATHER = "gather"
    """Its parameters are gathered; also where no release came before."""
    COMPUTE = "compute"
    """Its module's forward or backward."""
    WAIT = "wait"
    """The stream that computes waits: for the unit's gather, or for room for its reduction."""
    REDUCE = "reduce"
    """Its gradients are reduced. The end is where the result is delivered."""
    RELEASE = "release"
    """Its gather buffer was released, on the stream that computes. It has no end."""


@dataclass(frozen=True, slots=True)
class UnitEvent:
    """An operation of one unit begins or ends, as the host issues it.

    The stream of the operation is current meanwhile, so that an event recorded there marks the begin or end on the
    device; operations on the host begin and end at the call.

    A begin may have no end: a step may fail. A unit may be gathered and never compute, and may compute several times
    between two gathers; under activation checkpointing, a backward contains another forward. A unit computes while
    units inside of it do, and while it waits for them.
    """

    operation: UnitOperation
    unit: UnitSpec
    begins: bool = True
    """Whether it begins, and does not end."""
    backward: bool = False
    """Of a computation, whether it is the backward, or a forward that is repeated in one."""


class Observer(Protocol):
    """A listener's ``make_observer`` hook returns one, or None, for each unit at wrap.

    It must not issue collectives, synchronize with the device, or raise.
    """

    @abstractmethod
    def __call__(self, event: UnitEvent, /) -> None:
        """Called with each event of the unit."""
        ...


class Listener:
    """Optional base of a listener plugin: hook implementations are marked with ``polyshard.hookimpl``.

    A plugin is a callable ``(context: PluginContext, **options) -> object`` in the group ``polyshard.plugins``. The
    hooks are those of ``polyshard.hookspecs``. A listener runs only where the configuration names it: installing a
    package changes no numbers.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""


class Clock:
    """Stamps of the present point of a step, for operations that run on the host, or that the host waits for."""

    @property
    def runs(self) -> bool:
        """Whether operations run that are issued now, and are not recorded."""
        return True

    def stamp(self) -> Any:
        """The present point. Does not synchronize with the device."""
        return time.perf_counter_ns()

    def passed(self, stamp: Any) -> bool:
        """Whether the device has reached ``stamp``."""
        return True

    def wait(self, stamp: Any) -> None:
        """Block until the device has reached ``stamp``."""

    def microseconds(self, first: Any, then: Any) -> float:
        """From ``first`` to ``then``, both of which have passed."""
        return float(then - first) / 1000

    def memory(self) -> tuple[int, int] | None:
        """Bytes that tensors take now, and that the allocator holds; None without an allocator to ask."""
        return None


class StreamClock(Clock):
    """For CUDA: timing events on whichever stream of ``device`` is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    @override
    def runs(self) -> bool:
        # An event of a capture belongs to the graph: it is never reached outside.
        return not torch.cuda.is_current_stream_capturing()

    @override
    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @override
    def passed(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())  # type: ignore[no-untyped-call]

    @override
    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()

    @override
    def microseconds(self, first: torch.cuda.Event, then: torch.cuda.Event) -> float:
        return 1000 * float(first.elapsed_time(then))

    @override
    def memory(self) -> tuple[int, int]:
        # One call: each of memory_allocated() and memory_reserved() makes and flattens the whole dictionary again.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
