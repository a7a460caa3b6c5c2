"""Which job saves into a folder, for as long as it may."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import disk
from .documents import MalformedError, a_count, a_list, a_text, an_object, parse, render

NAME = ".job-lock"
#: More is nothing that was written there.
_MOST = 4096
#: Of file systems that have no locks.
_WITHOUT = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class JobLock:
    """This process's claim to a folder, until ``release`` or its end, however it comes.

    The system lets go of a lock with the process that holds it, so that nothing is left of a job that was killed. The
    file itself stays, and says who had the lock last.
    """

    def __init__(self, folder: Path) -> None:
        """Claim ``folder``, which is there. Models of one process share it.

        Raises:
            ConfigError: another process holds it; says which.
            OSError: the file cannot be made; names it.
        """
        self.folder = folder.resolve()
        path = self.folder / NAME
        self._descriptor: int | None = None
        self._lockless = False
        with disk.naming(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
            try:
                self._claim(descriptor)
            except BaseException:
                os.close(descriptor)
                raise

    @property
    def held(self) -> bool:
        """Whether others are kept from the folder still."""
        # Where another model of this process had it, that one may have been closed since.
        return self._lockless or (self._descriptor is not None and not self.removed)

    @property
    def removed(self) -> bool:
        """Whether somebody removed the file that this process locked."""
        if self._descriptor is None:
            return False
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    def release(self) -> None:
        """Let others have the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    def _claim(self, descriptor: int) -> None:
        mine = _identity()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _WITHOUT:
                self._lockless = True
                warnings.warn(
                    f"{self.folder} is on a file system without locks ({error.strerror}): that no other job saves "
                    "there cannot be seen to.",
                    stacklevel=6,
                )
            elif error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            else:
                self._refuse_others(descriptor, mine)
            os.close(descriptor)
            return
        os.ftruncate(descriptor, 0)
        disk.write_at(descriptor, [memoryview(render({"process": mine, "since": int(time.time())}))], 0, self._path)
        self._descriptor = descriptor
        # Forked helpers, such as a loader's workers, outlive a parent that is killed for a while, and would hold it.
        os.register_at_fork(after_in_child=_Leaving(weakref.ref(self)))

    @property
    def _path(self) -> Path:
        return self.folder / NAME

    def _refuse_others(self, descriptor: int, mine: list[Any]) -> None:
        process: list[Any] = []
        since = 0
        with suppress(MalformedError, KeyError, OSError):
            told = an_object(parse(os.pread(descriptor, _MOST, 0)), "the lock")
            process, since = a_list(told["process"], "process"), a_count(told["since"], "since")
        if process == mine:
            # Another model of this process has it.
            return
        who = "another process"
        with suppress(MalformedError, IndexError):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(since, 2**40)))
            who = f"process {a_count(process[1], 'pid')} on {a_text(process[0], 'host')!r}, since {when}"
        raise ConfigError(
            f"Another job saves into {self.folder}: {who}. Give each run a folder of its own, or end that one: its "
            "lock ends with it."
        )


class _Leaving:
    """Lets go of a lock in a forked child. Not a method: that would keep the lock for good."""

    def __init__(self, lock: weakref.ref[JobLock]) -> None:
        self._lock = lock

    def __call__(self) -> None:
        lock = self._lock()
        if lock is not None:
            lock.release()


def _identity() -> list[Any]:
    """Of this process, and of no other one: numbers of processes come again."""
    began = boot = ""
    with suppress(OSError, IndexError):
        # The name in brackets may have blanks; the start is the 22nd field.
        began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [socket.gethostname(), os.getpid(), began, boot]
