"""Ranks that are threads, kept on one core: they take turns anyway."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def one_core() -> Iterator[None]:
    """Threads that are started inside stay on the core on which this one runs now.

    One alone can hold the interpreter lock. Those of other cores try to take it whenever it is let go, which costs
    more than what the tests compute: on two cores the same tests take twice the CPU time.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {psutil.Process().cpu_num()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
