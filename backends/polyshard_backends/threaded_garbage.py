"""When Python collects cyclic garbage while the ranks of a ``ThreadedWorld`` run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ThreadedGarbage:
    """Keeps automatic collection away from C++ code that holds a mutex.

    Before Python 3.12 any allocation of an object may collect, also one that torch makes under a mutex, such as that
    of the default random generator, or while it initialises a static variable. A collection runs Python code, which
    can hand the interpreter lock to another rank. When that rank wants the same mutex, it waits for it with the
    interpreter lock held, and the process stands still: no timeout written in Python fires any more.
    """

    def __init__(self) -> None:
        self._postponed = False

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Collect in ``collect_due`` only, until the context ends. Nothing changes where collection is off already."""
        # From 3.12 on Python itself collects between bytecodes only.
        if sys.version_info >= (3, 12) or not gc.isenabled():
            yield
            return
        gc.disable()
        self._postponed = True
        try:
            yield
        finally:
            self._postponed = False
            gc.enable()

    def collect_due(self) -> None:
        """Collect the oldest generation that is due; to be called where the thread holds no mutex of C++."""
        if not self._postponed:
            return
        # Allocations are counted while collection is off, too.
        counts, thresholds = gc.get_count(), gc.get_threshold()
        for generation in reversed(range(len(counts))):
            if 0 < thresholds[generation] < counts[generation]:
                gc.collect(generation)
                return
