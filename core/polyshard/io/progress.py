"""Progress of long work on one thread: what is done, and of how much, for whoever wants to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: Called with what is done, and with how much there is; 0 where that is not known.
Told = Callable[[int, int], None]
# Of one thread: ranks may be threads, and a save in the background has one of its own, which nobody listens to.
_told: ContextVar[Told | None] = ContextVar("polyshard_progress", default=None)


@contextmanager
def telling(told: Told | None) -> Iterator[None]:
    """Let ``told`` hear of what this thread does inside; None for nobody."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def tell(done: int, total: int) -> None:
    """Say that ``done`` of ``total`` is done: bytes of files, or whatever the work consists of."""
    told = _told.get()
    if told is not None:
        told(done, total)
