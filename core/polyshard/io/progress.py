"""Progress of long work on one thread: what is done, and of how much, for whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Called with what is done, and with how much there is; 0 where that is not known.
OnProgress = Callable[[int, int], None]
# Of one thread: ranks may be threads, and a save in the background has one of its own, which nobody listens to.
_on_progress: ContextVar[OnProgress | None] = ContextVar("polyshard_progress", default=None)


@contextmanager
def reporting_progress(on_progress: OnProgress | None) -> Iterator[None]:
    """Let ``on_progress`` hear of what this thread does inside; None for nobody."""
    token = _on_progress.set(on_progress)
    try:
        yield
    finally:
        _on_progress.reset(token)


def report_progress(done: int, total: int) -> None:
    """Say that ``done`` of ``total`` is done: bytes of files, or whatever the work consists of."""
    on_progress = _on_progress.get()
    if on_progress is not None:
        on_progress(done, total)
