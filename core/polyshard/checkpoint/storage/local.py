"""Local disk, and what is mounted as one: files of the system, renames, and locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

from typing_extensions import override

from ...errors import ConfigError
from ...io.files import naming, opened, sync_directory, write_at
from .contract import LOCK, MARKER, MOST_OF_LOCK, Attempt, Holder, InputFile, JobLock, OutputFile, Storage, is_written

#: What says of a path that it can be no folder, or none of this program's.
_NO_FOLDER = frozenset(
    {errno.EACCES, errno.EEXIST, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)
#: Names of directories that are no checkpoint yet, or no longer. Nobody else has such.
_UNFINISHED = re.compile(r"\.unfinished-[0-9a-f]{32}")
#: Of file systems that have no locks.
_WITHOUT = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
#: Bytes that go to disk together while others are hashed.
_FLUSHED = 32 << 20


class LocalStorage(Storage[Path]):
    """One folder is seen by all ranks, on a file system of one machine or shared by several."""

    errors_pass = False

    @override
    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    @override
    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    @override
    def sizes(self, directory: Path) -> dict[str, int]:
        found = {}
        for path in directory.iterdir():
            # Others may give it the name that it is to have.
            with suppress(FileNotFoundError):
                found[path.name] = path.stat().st_size
        return found

    @override
    def opened(self, directory: Path, name: str, size: int | None = None) -> AbstractContextManager[InputFile]:
        return opened(directory, name, size)

    @contextmanager
    @override
    def created(self, path: Path, size: int) -> Iterator[OutputFile]:
        with naming(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                yield _Output(descriptor, path)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @override
    def write_whole(self, path: Path, content: bytes) -> None:
        with self.created(path, len(content)) as file:
            file.write([memoryview(content)], 0)

    @override
    def replace_whole(self, path: Path, content: bytes) -> None:
        temporary = path.with_name(f"{path.name}.tmp")
        with naming(temporary):
            temporary.unlink(missing_ok=True)
            self.write_whole(temporary, content)
            temporary.replace(path)

    @override
    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    @override
    def remove_tree(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    @override
    def discard(self, directory: Path) -> None:
        if directory.is_symlink():
            return
        # Where the next save finds them, should this not live to its end.
        with closing(LocalAttempt(directory.parent, None)) as aside:
            for path in sorted(directory.iterdir(), key=lambda path: path.name != MARKER):
                if is_written(path.name) and stat.S_ISREG(path.lstat().st_mode):
                    path.rename(aside.path / path.name)
            with suppress(OSError):
                directory.rmdir()

    @override
    def claim(self, folder: Path) -> LocalJobLock:
        _make_folder(folder)
        return LocalJobLock(folder)

    @contextmanager
    @override
    def attempt(self, folder: Path, name: str | None) -> Iterator[LocalAttempt]:
        """As the contract says. ``name``: None for what is never committed."""
        _make_folder(folder)
        for path in folder.iterdir():
            is_left = _UNFINISHED.fullmatch(path.name) is not None and not path.is_symlink()
            lock = _lock(path, wait=False) if is_left else None
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        with closing(LocalAttempt(folder, name)) as attempt:
            yield attempt

    @override
    def beat(self, attempt: Path) -> None:
        os.utime(attempt)

    @override
    def beat_of(self, attempt: Path) -> object:
        try:
            return attempt.stat().st_mtime_ns
        except OSError:
            return None


def _make_folder(folder: Path) -> None:
    """Have ``folder``, made with those around it where missing.

    Raises ConfigError: it cannot be: a file or a link that leads nowhere is in its place, its name is too long, or this
    program may not; OSError: the system failed; names it.
    """
    try:
        with naming(folder):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        where = "" if error.filename == str(folder) else f" ({error.filename})"
        why = "it is in the way, and no directory" if error.errno == errno.EEXIST else error.strerror
        raise ConfigError(
            f"{folder} can be no folder to save into: {why}{where}. Name another one, or make room for it."
        ) from error


class _Output:
    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self._flushed = 0

    def write(self, block: Sequence[memoryview], at: int) -> None:
        write_at(self._descriptor, block, at, self._path)

    def follow(self, block: Sequence[memoryview], at: int) -> None:
        end = at + sum(map(len, block))
        if end - self._flushed >= _FLUSHED:
            # Not needed: Linux then begins to write it out, and keeps what is not written yet. Less is left to fsync.
            os.posix_fadvise(self._descriptor, self._flushed, end - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = end


class LocalAttempt(Attempt[Path]):
    """A directory that no other save writes to, locked for as long as this process works on it."""

    def __init__(self, folder: Path, name: str | None) -> None:
        super().__init__()
        self.path = folder / f".unfinished-{self.identity}"
        self.target = folder / (name or self.path.name)
        self._lock: int | None = None
        # Between the two, another job may take it for what an ended one left.
        while not self.path.is_dir():
            self._unlock()
            self.path.mkdir()
            self._lock = _lock(self.path, wait=True)

    @override
    def commit(self, marker: bytes) -> None:
        LocalStorage().replace_whole(self.path / MARKER, marker)
        sync_directory(self.path)
        target = self.target
        try:
            self.path.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ConfigError(
                f"{target} was made while this save went on. Another job saves into the folder: give each run a folder "
                "of its own."
            ) from error
        self.committed = True
        try:
            sync_directory(target.parent)
        except OSError:
            # A save that raises must leave no checkpoint.
            with suppress(OSError):
                target.rename(self.path)
                self.committed = False
            raise

    @override
    def close(self) -> None:
        if not self.committed and not self.stays:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(path: Path, *, wait: bool) -> int | None:
    """Lock a directory until the returned descriptor is closed or the process ends; None where that cannot be."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        # Held by another process, gone, or on a file system without locks: remains then stay.
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


class LocalJobLock(JobLock[Path]):
    """This process's claim to a folder, until ``release`` or its end, of whatever kind.

    The system releases a lock with the process that holds it, so that nothing is left of a job that was killed. The
    file itself stays, and says who had the lock last.
    """

    def __init__(self, folder: Path) -> None:
        """Claim ``folder``, which is there. Errors as ``Storage.claim``, and OSError: the file cannot be made."""
        self.folder = folder.resolve()
        path = self.folder / LOCK
        self._descriptor: int | None = None
        self._lockless = False
        with naming(path):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
            try:
                self._claim(descriptor, path)
            except BaseException:
                os.close(descriptor)
                raise

    @property
    @override
    def held(self) -> bool:
        # Where another model of this process had it, that one may have been closed since.
        return self._lockless or (self._descriptor is not None and not self.removed)

    @property
    @override
    def removed(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            there = os.stat(self.folder / LOCK, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    @override
    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.release()

    def _claim(self, descriptor: int, path: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _WITHOUT:
                self._lockless = True
                warnings.warn(
                    f"{self.folder} is on a file system without locks ({error.strerror}): that no other job saves "
                    "there cannot be seen to.",
                    stacklevel=8,
                )
            elif error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            else:
                holder = Holder([], 0)
                with suppress(OSError):
                    holder = Holder.of(os.pread(descriptor, MOST_OF_LOCK, 0))
                # Else another model of this process has it.
                if not holder.is_this_process:
                    raise holder.refused(self.folder) from None
            os.close(descriptor)
            return
        os.ftruncate(descriptor, 0)
        write_at(descriptor, [memoryview(Holder.content())], 0, path)
        self._descriptor = descriptor
        # Forked helpers, such as a loader's workers, outlive a parent that is killed for a while, and would hold it.
        # Weak: a bound method would keep the lock for good.
        lock = weakref.ref(self)

        def release_in_child() -> None:
            living = lock()
            if living is not None:
                living.release()

        os.register_at_fork(after_in_child=release_in_child)
