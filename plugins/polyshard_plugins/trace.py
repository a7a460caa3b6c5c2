"""The listener ``trace``: records single steps, and writes each as a file and a picture."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Container, Iterable
from pathlib import Path

import torch
from polyshard import hookimpl
from polyshard.errors import ConfigError
from polyshard.interfaces import Listener, Observer, PluginContext, UnitSpec

from ._trace_marks import Clock, HostClock, Kind, Recording, StreamClock
from .trace_files import read_trace, write_trace
from .trace_picture import draw_trace
from .trace_step import Lane, MemorySample, Span, StepTrace

__all__ = ["Lane", "MemorySample", "Span", "StepTrace", "Trace", "draw_trace", "read_trace", "write_trace"]

_PICTURES = ("png", "svg", "none")


class Trace(Listener):
    """``trace``: when each unit gathered, computed and reduced in single steps, and what memory there was.

    A step is an outermost forward of the model and what follows until its backward has ended, or until the next forward
    where that comes first. Of each step asked for, and each rank, two files come into the folder:
    ``step-3-rank-0.json`` in Chrome's trace format, which ``read_trace`` reads, and ``step-3-rank-0.png``.

    On a CUDA device times are the device's, and nothing waits for it while training runs: files are written at the
    first begin of a later step by which the device has got through the traced one; at a checkpoint; and by ``flush``
    and ``close``, which wait. On other devices times are the host's, and files are written when the step ends.

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

        ``steps``: which to trace, counted from 1: a number, a list, ``"first"`` or ``"every"``. The first one or two
        are no good measure: memory is taken then, and the order of units is not known yet.

        ``ranks``: which of them write: a number, a list, or ``"all"``. ``rank``: this process's, where neither a
        process group that the user gave nor ``torch.distributed`` says it; otherwise 0.

        ``picture``: ``"png"``, ``"svg"`` or ``"none"``. Raises ``ConfigError`` for a value that an option cannot take,
        and for a picture without matplotlib.
        """
        where = f"listener {context.name!r}"
        self._folder = _folder(folder, where)
        self._steps = _steps(steps, where)
        self._rank = _rank_of(context) if rank is None else _number(rank, 0, "rank", where)
        self._traces = self._rank in _ranks(ranks, where)
        self._picture = _picture(picture, where) if self._traces else "none"
        self._device = context.device
        self._clock: Clock = StreamClock(context.device) if context.device.type == "cuda" else HostClock()
        self._begun = 0
        self._observer = _UnitObserver()
        self._pending: list[Recording] = []

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        """One for all units; None on a rank that writes nothing."""
        return self._observer if self._traces else None

    @hookimpl
    def step_begin(self) -> None:
        """Write what is complete, and start to record where the step is asked for."""
        self._begun += 1
        if not self._traces:
            return
        self._stop()
        wanted = self._begun in self._steps
        if not (wanted or self._pending):
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Asking an event would also end the capture.
            if wanted:
                warnings.warn(
                    f"Step {self._begun} is captured in a CUDA graph and not traced (rank {self._rank}): nothing in it "
                    "runs. Trace an earlier or later one by the option 'steps'.",
                    stacklevel=2,
                )
            return
        self._write_complete()
        if wanted:
            self._observer.recording = Recording(self._begun, self._rank, self._device, self._clock)

    @hookimpl
    def step_end(self) -> None:
        """Stop to record."""
        if self._observer.recording is not None:
            self._stop()
            self._write_complete()

    @hookimpl
    def on_save(self) -> None:
        """Write everything: a checkpoint has waited for the device already."""
        self.flush()

    def flush(self) -> None:
        """Wait until the device has got through the steps that were traced, and write them."""
        for recording in self._pending:
            recording.wait()
        self._write_complete()

    def close(self) -> None:
        """Stop to record, now and from now on, and flush."""
        self._stop()
        self._steps = ()
        self.flush()

    def _stop(self) -> None:
        recording = self._observer.recording
        if recording is not None:
            self._observer.recording = None
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


class _UnitObserver:
    """Passes on what units do, while something records."""

    __slots__ = ("recording",)

    def __init__(self) -> None:
        self.recording: Recording | None = None

    def unshard(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark(Kind.UNSHARD, unit)

    def unsharded(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark(Kind.UNSHARDED, unit)

    def compute(self, unit: UnitSpec, backward: bool) -> None:
        if self.recording is not None:
            self.recording.mark_with_memory(Kind.COMPUTE, unit, backward)

    def computed(self, unit: UnitSpec, backward: bool) -> None:
        if self.recording is not None:
            self.recording.mark_with_memory(Kind.COMPUTED, unit, backward)

    def wait(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark(Kind.WAIT, unit)

    def waited(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark(Kind.WAITED, unit)

    def reduce(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark(Kind.REDUCE, unit)

    def reduced(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark(Kind.REDUCED, unit)

    def reshard(self, unit: UnitSpec) -> None:
        if self.recording is not None:
            self.recording.mark_with_memory(Kind.RESHARD, unit)


class _Every(Container[int]):
    """Holds all numbers."""

    def __contains__(self, number: object) -> bool:
        return True


def _steps(value: int | str | Iterable[int], where: str) -> Container[int]:
    if value == "first":
        return (1,)
    if value == "every":
        return _Every()
    return _numbers(value, 1, "steps", where, "'first', 'every'")


def _ranks(value: int | str | Iterable[int], where: str) -> Container[int]:
    return _Every() if value == "all" else _numbers(value, 0, "ranks", where, "'all'")


def _numbers(value: int | str | Iterable[int], least: int, option: str, where: str, words: str) -> frozenset[int]:
    remedy = f"Write {words}, a whole number of at least {least}, or a list of such numbers."
    if isinstance(value, str) or not isinstance(value, int | Iterable):
        raise ConfigError(f"{value!r} says nothing, in {option} of {where}. {remedy}")
    listed = [value] if isinstance(value, int) else list(value)
    if not listed:
        raise ConfigError(f"{option} of {where} is empty. {remedy} To trace nothing, leave the listener out.")
    return frozenset(_number(each, least, option, where) for each in listed)


def _number(value: object, least: int, option: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{value!r} is no whole number of at least {least}, in {option} of {where}. Give one.")
    return value


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


def _rank_of(context: PluginContext) -> int:
    if context.process_group is not None:
        return int(context.process_group.rank())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
