"""Calls in a few threads, for what leaves the interpreter alone: digests, reads, writes."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
#: More would not go faster than the disks and memory that they use.
MOST = 4


def carried_out(calls: Iterable[Callable[[], T]], count: int) -> Iterator[T]:
    """What the calls return, in their order. Twice as many as there are threads are taken ahead.

    No executor of ``concurrent.futures``: that takes no work once a program's main thread has ended, when a save in the
    background may still go on.

    Args:
        calls: Taken one by one, in the calling thread.
        count: How many there are, about.
    """
    threads = min(MOST, os.cpu_count() or 1, count)
    if threads < 2:
        for call in calls:
            yield call()
        return
    jobs: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
    crew = [threading.Thread(target=_serve, args=(jobs,), daemon=True) for _ in range(threads)]
    waiting: deque[Future[T]] = deque()
    started: list[threading.Thread] = []
    try:
        for each in crew:
            each.start()
            started.append(each)
        for call in calls:
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
            future: Future[T] = Future()
            waiting.append(future)
            jobs.put((future, call))
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in started:
            jobs.put(None)
        for each in started:
            each.join()


def _serve(jobs: SimpleQueue[tuple[Future[T], Callable[[], T]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        # Neither its memory nor its result lives on until the next job comes.
        del job, future, call
