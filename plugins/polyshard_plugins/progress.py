"""The listener ``progress``: a line in the terminal while a checkpoint is saved or loaded."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

import torch
from polyshard import hookimpl
from polyshard.interfaces import Listener, PluginContext

from .finite import rank_of

#: Seconds between two changes of the line.
_PAUSE_S = 0.1
_GIB, _MIB = 2**30, 2**20


class ProgressLine:
    """One line that is written over, and removed at the end. It alone decides whether there is anything to see."""

    def __init__(self, *, rank: int = 0, unit: str = "bytes", stream: TextIO | None = None) -> None:
        """Args:
        rank: This process's: the first one's line is shown, of its own part of the work.
        unit: What is counted.
        stream: Where to; None for stderr. Nothing is written to what is no terminal, or one that cannot remove a line.
        """
        self._stream = sys.stderr if stream is None else stream
        self._unit = unit
        self._began = self._next = 0.0
        self._work: str | None = None
        self.shows = rank == 0 and self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, work: str, done: int, total: int) -> None:
        """Show ``done`` of ``total`` of ``work``; ``total`` is 0 where it is not known. All done removes the line."""
        if not self.shows:
            return
        now = time.monotonic()
        if work != self._work:
            self._work, self._began, self._next = work, now, now
        if done >= total > 0:
            self.end()
        elif now >= self._next:
            self._next = now + _PAUSE_S
            self._write(f"{work}: {self._figures(done, total, now - self._began)}")

    def end(self) -> None:
        """Remove the line, where there is one."""
        if self._work is not None:
            self._work = None
            self._write("")

    def _figures(self, done: int, total: int, seconds: float) -> str:
        if self._unit != "bytes":
            return f"{done:,} of {total:,} {self._unit}" if total else f"{done:,} {self._unit}"
        size, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
        rate = f", {done / seconds / _MIB:,.0f} MiB/s" if seconds > _PAUSE_S else ""
        return f"{done / max(1, total):.0%}, {done / size:.1f} of {total / size:.1f} {name}{rate}"

    def _write(self, text: str) -> None:
        # A line that breaks could not be removed. Figures are at its end.
        columns = shutil.get_terminal_size().columns
        shown = text if len(text) < columns else f"...{text[4 - columns :]}"
        # Back to the first column, and what is right of it away.
        self._stream.write(f"\r\x1b[K{shown}")
        self._stream.flush()


class Progress(Listener):
    """``progress``: shows how far rank 0 is with saving or loading, where stderr is a terminal.

    Of saves and loads that end quickly nothing is left on the screen. A save in the background shows nothing. In a
    training step this listener has no part.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        self._line = ProgressLine(rank=rank_of(context))

    @hookimpl
    def on_progress(self, work: str, done: int, total: int) -> None:
        """Change the line."""
        self._line(work, done, total)

    @hookimpl
    def on_save(self, model: torch.nn.Module) -> None:
        """Remove the line."""
        self._line.end()

    @hookimpl
    def on_load(self, model: torch.nn.Module) -> None:
        """Remove the line."""
        self._line.end()
