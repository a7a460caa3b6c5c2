"""The listener ``trace``: records single steps, and writes each as a file and a picture."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from polyshard import hookimpl
from polyshard.errors import ConfigError
from polyshard.interfaces import (
    Clock,
    Listener,
    Observer,
    PluginContext,
    StreamClock,
    UnitEvent,
    UnitOperation,
    UnitSpec,
)

from .finite import rank_of
from .precision import whole_number
from .trace_step import Lane, MemorySample, Span, StepTrace, draw_trace, read_trace, write_trace

__all__ = ["Lane", "MemorySample", "Span", "StepTrace", "Trace", "draw_trace", "read_trace", "write_trace"]

_PICTURES = ("png", "svg", "none")


class Trace(Listener):
    """``trace``: when each unit gathered, computed and reduced in single steps, and how much memory was taken.

    A step is an outermost forward of the model and all that follows until its backward has ended, or until the next
    forward if that comes first. For each step asked for, and each rank, two files are written into the folder:
    ``step-3-rank-0.json`` in Chrome's trace format, which ``read_trace`` reads, and ``step-3-rank-0.png``.

    On a CUDA device times are the device's, and training never waits for them: files are written at the first begin of
    a later step by which the device has finished the traced one; at a checkpoint; and by ``flush`` and ``close``, which
    wait. On other devices times are the host's, and files are written when the step ends.

    Between traced steps each call of an observer costs one comparison. A step that is captured in a CUDA graph is not
    traced, with a warning: nothing in it runs. A file that cannot be written is a warning, too.
    """

    api_version = 1
    local_options = frozenset({"folder", "rank"})

    def __init__(
        self,
        context: PluginContext,
        folder: str | os.PathLike[str],
        steps: int | str | Iterable[int] = 3,
        ranks: int | str | Iterable[int] = 0,
        rank: int | None = None,
        picture: str = "png",
    ) -> None:
        """``folder`` is made when something is written; files of the same step and rank are written anew.

        ``steps``: the steps to trace, counted from 1: a number, a list, ``"first"`` or ``"every"``. The first
        two are not typical: they allocate memory, and do not know the order of units yet.

        ``ranks``: the ranks that write: a number, a list, or ``"all"``. ``rank``: this process's, where neither the
        context nor ``torch.distributed`` knows it; otherwise 0.

        ``picture``: ``"png"``, ``"svg"`` or ``"none"``. Raises ``ConfigError`` for a value that an option cannot take,
        and for a picture without matplotlib.
        """
        where = f"listener {context.name!r}"
        self._folder = _folder(folder, where)
        self._steps = _steps(steps, where)
        self._rank = rank_of(context) if rank is None else whole_number(rank, 0, f"rank of {where}")
        self._traces = self._rank in _ranks(ranks, where)
        self._picture = _picture(picture, where) if self._traces else "none"
        self._device = context.device
        self._clock = StreamClock(context.device) if context.device.type == "cuda" else Clock()
        self._begun = 0
        self._recording: Recording | None = None
        self._pending: list[Recording] = []

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        """One for all units; None on a rank that writes nothing."""
        return self._observe if self._traces else None

    def _observe(self, event: UnitEvent) -> None:
        if self._recording is not None:
            self._recording.mark(event)

    @hookimpl
    def step_begin(self) -> None:
        """Write the recordings that are complete, and begin another if the step is asked for."""
        self._begun += 1
        if not self._traces:
            return
        self._stop()
        wanted = self._begun in self._steps
        if not (wanted or self._pending):
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Querying an event would end the capture, too.
            if wanted:
                warnings.warn(
                    f"Step {self._begun} is captured in a CUDA graph and not traced (rank {self._rank}): nothing in it "
                    "runs. Trace an earlier or later one by the option 'steps'.",
                    stacklevel=2,
                )
            return
        self._write_complete()
        if wanted:
            self._recording = Recording(self._begun, self._rank, self._device, self._clock)

    @hookimpl
    def step_end(self) -> None:
        if self._recording is not None:
            self._stop()
            self._write_complete()

    @hookimpl
    def on_save(self) -> None:
        """Write everything: a checkpoint has waited for the device already."""
        self.flush()

    def flush(self) -> None:
        """Wait until the device has finished the traced steps, and write them."""
        for recording in self._pending:
            recording.wait()
        self._write_complete()

    def close(self) -> None:
        self._stop()
        self._steps = ()
        self.flush()

    def _stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.end()
            self._pending.append(recording)

    def _write_complete(self) -> None:
        while self._pending and self._pending[0].complete:
            self._write(self._pending.pop(0).trace())

    def _write(self, trace: StepTrace) -> None:
        path = self._folder / f"step-{trace.step}-rank-{trace.rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_trace(trace, path.with_suffix(".json"))
            if self._picture != "none":
                draw_trace(trace, path.with_suffix(f".{self._picture}"))
        except Exception as error:
            # A full disk, or a matplotlib that does not import, is no reason to end a training.
            warnings.warn(f"Step {trace.step} was traced, but {path} cannot be written: {error!r}", stacklevel=2)


#: Operations of the stream that computes, whose marks also note the memory taken.
_WITH_MEMORY = frozenset({UnitOperation.COMPUTE, UnitOperation.RELEASE})


class _Mark(NamedTuple):
    event: UnitEvent
    stamp: Any
    memory: tuple[int, int] | None


class Recording:
    """The marks of one step, from the moment when it is made, and the ``StepTrace`` that they give afterwards."""

    def __init__(self, step: int, rank: int, device: torch.device, clock: Clock) -> None:
        self._step = step
        self._rank = rank
        self._device = device
        self._clock = clock
        self._marks: list[_Mark] = []
        self._begin = clock.stamp()
        self._memory_at_begin = clock.memory()
        self._end: Any = None
        self._memory_at_end: tuple[int, int] | None = None

    def mark(self, event: UnitEvent) -> None:
        """The operation is at this point of the current stream."""
        stamp = self._clock.stamp()
        self._marks.append(_Mark(event, stamp, self._clock.memory() if event.operation in _WITH_MEMORY else None))

    def end(self) -> None:
        """The step ends at this point of the current stream."""
        self._end = self._clock.stamp()
        self._memory_at_end = self._clock.memory()

    @property
    def complete(self) -> bool:
        # The last ones first: those that are still to come are among them.
        return self._clock.passed(self._end) and all(self._clock.passed(mark.stamp) for mark in reversed(self._marks))

    def wait(self) -> None:
        for mark in self._marks:
            self._clock.wait(mark.stamp)
        self._clock.wait(self._end)

    def trace(self) -> StepTrace:
        """The step that the marks tell of, once they are complete."""
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
        begun: dict[tuple[UnitOperation, UnitSpec, bool], deque[int]] = defaultdict(deque)
        ended: dict[int, float] = {}
        for position, (event, *_) in enumerate(self._marks):
            open_ones = begun[event.operation, event.unit, event.backward]
            if event.begins:
                open_ones.append(position)
            elif open_ones:
                # A recomputation ends before the backward that holds it; gathers and reductions end in order.
                first = open_ones.pop() if event.operation is UnitOperation.COMPUTE else open_ones.popleft()
                ended[first] = times[position]
        return [
            Span(
                lane=Lane(event.operation),
                unit=event.unit.label,
                start_us=times[position],
                end_us=ended.get(position, max(duration, times[position])),
                backward=event.backward,
                nbytes=_nbytes(event.unit),
                dtype=str(event.unit.master_dtype).removeprefix("torch."),
                finished=position in ended,
                over=event.unit.ranks,
            )
            for position, (event, *_) in enumerate(self._marks)
            if event.begins and event.operation is not UnitOperation.RELEASE
        ]

    def _samples(self, times: list[float], duration: float) -> list[MemorySample]:
        """One for each mark that has memory: marks of one stream, which reaches them in the order of issue.

        One for every mark where these are the host's: they are in the order in which they were taken.
        """
        on_host = type(self._clock) is Clock
        samples = [_sample(0.0, 0, self._memory_at_begin)]
        gathered: dict[UnitSpec, int] = {}
        for (event, _, memory), at in zip(self._marks, times, strict=True):
            if event.operation is UnitOperation.RELEASE:
                gathered.pop(event.unit, None)
            elif event.operation is UnitOperation.GATHER and event.begins:
                gathered[event.unit] = _nbytes(event.unit)
            if on_host or memory is not None:
                samples.append(_sample(at, sum(gathered.values()), memory))
        samples.append(_sample(duration, sum(gathered.values()), self._memory_at_end))
        return samples


def _sample(at: float, gathered: int, memory: tuple[int, int] | None) -> MemorySample:
    return MemorySample(at, gathered, *(memory or ()))


def _nbytes(unit: UnitSpec) -> int:
    return unit.numel * unit.master_dtype.itemsize


def _steps(value: int | str | Iterable[int], where: str) -> Container[int]:
    if value == "first":
        return (1,)
    return range(1, sys.maxsize) if value == "every" else _numbers(value, 1, "steps", where, "'first', 'every'")


def _ranks(value: int | str | Iterable[int], where: str) -> Container[int]:
    return range(sys.maxsize) if value == "all" else _numbers(value, 0, "ranks", where, "'all'")


def _numbers(value: int | str | Iterable[int], least: int, option: str, where: str, words: str) -> frozenset[int]:
    remedy = f"Write {words}, a whole number of at least {least}, or a list of such numbers."
    if isinstance(value, str) or not isinstance(value, int | Iterable):
        raise ConfigError(f"{value!r} says nothing, in {option} of {where}. {remedy}")
    listed = [value] if isinstance(value, int) else list(value)
    if not listed:
        raise ConfigError(f"{option} of {where} is empty. {remedy} To trace nothing, leave the listener out.")
    return frozenset(whole_number(each, least, f"{option} of {where}") for each in listed)


def _folder(value: str | os.PathLike[str], where: str) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{value!r} is no folder, in folder of {where}. Give a path.")
    path = Path(value)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"folder of {where} is {str(path)!r}, which is a file. Give another path.")
    return path


def _picture(value: str, where: str) -> str:
    if value not in _PICTURES:
        raise ConfigError(f"{value!r} is no kind of picture, in picture of {where}. Write one of {list(_PICTURES)}.")
    if value != "none" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"picture of {where} is {value!r}, and matplotlib is not installed. Install polyshard[train], or set "
            "picture to 'none'."
        )
    return value
