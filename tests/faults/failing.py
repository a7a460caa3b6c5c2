"""Calls to the system that fail, one after another: as on a disk that is full, or broken."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: What a save may call to change what is on disk.
_CALLS = (
    "open",
    "mkdir",
    "write",
    "pwrite",
    "pwritev",
    "writev",
    "fsync",
    "fdatasync",
    "ftruncate",
    "rename",
    "replace",
    "link",
    "symlink",
)


class Failing:
    """Counts such calls below a folder's name, in all threads, and lets one of them fail, and those behind it."""

    def __init__(self, number: int | None, code: int, *, lasts: bool) -> None:
        """``number``: of the first call that fails, None for none; ``lasts``: whether all behind it fail, too."""
        self.calls = 0
        self.failed = 0
        self._number = number
        self._code = code
        self._lasts = lasts
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[Failing]:
        """In the place of the functions of ``os``, and of ``open`` for writing."""
        before: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CALLS}
        plain_open = io.open
        for name, call in before.items():
            setattr(os, name, self._around(name, call))
        io.open = self._opening(plain_open)  # type: ignore[assignment]
        try:
            yield self
        finally:
            for name, call in before.items():
                setattr(os, name, call)
            io.open = plain_open

    def _around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or (args[1:] and args[1] & (os.O_WRONLY | os.O_RDWR)):
                self._count(name)
            return call(*args, **kwargs)

        return failing

    def _opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wax+"):
                self._count("open")
            return call(file, mode, *args, **kwargs)

        return failing

    def _count(self, name: str) -> None:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
            fails = self._number is not None and (number == self._number or (self._lasts and number > self._number))
            self.failed += fails
        if fails:
            raise OSError(self._code, os.strerror(self._code), f"by {name}, call {number}")
