"""One save on its way: a directory of its own, which becomes the checkpoint in one step or goes away."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import ConfigError, PolyshardError
from . import disk
from .marker import MARKER, Marker

#: Names of directories that are no checkpoint yet, or no longer.
_UNFINISHED = ".unfinished-"


class Attempt:
    """A directory that no other save writes to, locked for as long as this process works on it."""

    def __init__(self, folder: Path) -> None:
        self.identity = uuid.uuid4().hex
        self.path = folder / f"{_UNFINISHED}{self.identity}"
        self.committed = False
        self._stays = False
        self._lock: int | None = None
        # Between the two, another job may take it for what an ended one left.
        while not self.path.is_dir():
            self._unlock()
            self.path.mkdir()
            self._lock = _lock(self.path, wait=True)

    def sizes(self, least: Mapping[str, int]) -> dict[str, int]:
        """Bytes of each file. ``least``: how many the ranks wrote.

        Raises:
            PolyshardError: a file is gone or shorter: something else works in the directory, or the ranks see
                different file systems.
        """
        found = {path.name: path.stat().st_size for path in self.path.iterdir()}
        for name, nbytes in least.items():
            if found.get(name, 0) < nbytes:
                raise PolyshardError(
                    f"'{name}' has {found.get(name, 0):,} of the {nbytes:,} bytes that were written to {self.path}. "
                    "All ranks must see the same file system, and nothing else may change it."
                )
        return found

    def commit(self, target: Path, marker: Marker) -> None:
        """Let ``target`` be the checkpoint.

        Raises:
            ConfigError: it is one already.
        """
        marker.write(self.path)
        _clear(target)
        try:
            self.path.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise _taken(target) from error
        self.committed = True
        try:
            disk.sync_directory(target.parent)
        except OSError:
            # Whoever is told that there is no checkpoint should not find one.
            with suppress(OSError):
                target.rename(self.path)
                self.committed = False
            raise

    def leave_to_others(self) -> None:
        """Let the directory stay when it is given back: others look there. The next save removes it."""
        self._stays = True

    def close(self) -> None:
        """Give the directory back, and remove it where it was not committed."""
        if not self.committed and not self._stays:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


@contextmanager
def attempt_in(folder: Path) -> Iterator[Attempt]:
    """A new attempt in ``folder``, which is made where missing.

    What saves left there that did not live to their end is removed first.

    Raises:
        ConfigError: it cannot be a folder.
    """
    disk.make_folder(folder)
    for path in folder.glob(f"{_UNFINISHED}*"):
        lock = None if path.is_symlink() else _lock(path, wait=False)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    attempt = Attempt(folder)
    try:
        yield attempt
    finally:
        attempt.close()


def discard(directory: Path) -> None:
    """Remove a checkpoint. It stops being one at once, whenever this is interrupted."""
    aside = directory.with_name(f"{_UNFINISHED}{uuid.uuid4().hex}")
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


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


def _clear(target: Path) -> None:
    """Remove what is at ``target`` where that is a save that did not end."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"{target} is in the way: it is no directory. Remove it, or save another step.")
    if (target / MARKER).exists():
        raise _taken(target)
    # In place: another job may commit there meanwhile, by a rename onto what is empty by then, and what this removes is
    # what it opened before.
    shutil.rmtree(target, ignore_errors=True)


def _taken(target: Path) -> ConfigError:
    if not (target / MARKER).exists():
        return ConfigError(f"{target} is in the way, and cannot be removed. Remove it, or save another step.")
    return ConfigError(
        f"The checkpoint {target} is committed already: another job saves into the folder. Give each run a folder of "
        "its own."
    )
