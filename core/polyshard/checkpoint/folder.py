"""The checkpoints in one folder: which is the latest, how one appears in one step, and which job saves there."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PolyshardError, StateError
from ..io.files import make_folder, naming, path_of, sync_directory, write_at
from . import reading
from .encoding import MalformedError, a_count, a_list, a_text, an_object, parse, render
from .manifest import MARKER, Marker

_DIRECTORY = re.compile(r"step-(\d{8,})(?:\.\d+)?")
#: Names of directories that are no checkpoint yet, or no longer.
_UNFINISHED = ".unfinished-"
NAME = ".job-lock"
#: More is nothing that was written there.
_MOST = 4096
#: Of file systems that have no locks.
_WITHOUT = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint."""

    directory: Path
    marker: Marker

    def problem(self, *, verified: bool) -> str | None:
        """The problem with its files; None without one. ``verified``: whether their contents are looked at."""
        try:
            if verified:
                reading.verify(self.directory)
            else:
                self.marker.require_files(self.directory)
        except (StateError, OSError) as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder holds."""

    entries: tuple[Entry, ...]
    """Committed checkpoints, in the order of their commits."""
    unreadable: tuple[str, ...] = ()
    """The problems of directories whose marker cannot be read."""

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """What ``folder`` holds; nothing where it does not exist."""
        entries, unreadable = [], []
        for directory in sorted(folder.iterdir()) if folder.is_dir() else ():
            if _DIRECTORY.fullmatch(directory.name) and os.path.lexists(directory / MARKER):
                try:
                    entries.append(Entry(directory, Marker.read(directory)))
                except (StateError, OSError) as error:
                    unreadable.append(str(error))
        entries.sort(key=lambda entry: (entry.marker.turn, entry.marker.step, entry.directory.name))
        return cls(tuple(entries), tuple(unreadable))

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(entry.marker.identity for entry in self.entries)

    def line(self, identity: str | None) -> Iterator[Entry]:
        """The entry ``identity`` and those that it goes back to, newest first."""
        by_identity = {entry.marker.identity: entry for entry in self.entries}
        while identity is not None and identity in by_identity:
            entry = by_identity.pop(identity)
            yield entry
            identity = entry.marker.parent


def latest(folder: Path, *, verify: bool = False) -> Path | None:
    """The checkpoint in ``folder`` that was committed last; None where there is none.

    One with files that are gone or of another size is passed over, with a warning that names it, for the one that it
    goes back to.

    Args:
        folder: The ``root`` of saves.
        verify: Whether to read what files hold, too, and to pass over checkpoints that ``polyshard.checkpoint.verify``
            refuses: takes as long as reading all of the newest.

    Raises:
        ConfigError: ``folder`` is no path.
    """
    contents = Contents.of(path_of(folder, "folder"))
    for text in contents.unreadable:
        warnings.warn(f"passed over: {text}", stacklevel=2)
    if not contents.entries:
        return None
    line = list(contents.line(contents.entries[-1].marker.identity))
    for entry in (*line, *(each for each in reversed(contents.entries) if each not in line)):
        problem = entry.problem(verified=verify)
        if problem is None:
            return entry.directory
        warnings.warn(f"passed over: {problem}", stacklevel=2)
    return None


@dataclass(frozen=True, slots=True)
class Line:
    """The checkpoints of one folder that one model saves and loads, each going on from the one before."""

    folder: Path
    """Absolute."""
    newest: str | None
    """Identity of the one that the model saved or loaded last; None where it did neither here."""
    known: frozenset[str]
    """Identities of all that was there when it did."""
    beside: str | None = None
    """Identity of the last one with finite parameters: between it and the newest one, others may have been removed."""

    @classmethod
    def begun(cls, folder: Path) -> Line:
        """A line that goes back to nothing in ``folder``."""
        return cls(folder.resolve(), None, Contents.of(folder).identities)

    @classmethod
    def from_loaded(cls, directory: Path, marker: Marker) -> Line:
        """The line that goes on from the checkpoint in ``directory``."""
        folder = directory.parent
        return cls(folder.resolve(), marker.identity, Contents.of(folder).identities | {marker.identity})

    def target(self, step: int) -> Path:
        """The directory for ``step``.

        A run that was resumed from an earlier step reaches steps that it had saved before: these stay, and the new ones
        get a number.

        Raises ConfigError: the step is committed already, or another job saves into the folder.
        """
        contents = self._require_alone()
        name = f"step-{step:08d}"
        taken = {entry.directory.name: entry for entry in contents.entries if entry.marker.step == step}
        own = [entry for entry in contents.line(self.newest) if entry.marker.step == step]
        if not own and self.newest is None:
            own = list(taken.values())
        if own:
            raise ConfigError(
                f"The checkpoint {own[0].directory} is committed already, and overwriting it in place could mix two "
                "steps. Save another step, or remove that directory."
            )
        number = 1
        while (self.folder / name / MARKER).exists():
            number += 1
            name = f"step-{step:08d}.{number}"
        return self.folder / name

    def next_turn(self) -> int:
        """Higher than that of all checkpoints that are there. Raises ConfigError: another job saves into the folder."""
        return 1 + max((entry.marker.turn for entry in self._require_alone().entries), default=0)

    def after(self, marker: Marker) -> Line:
        return replace(self, newest=marker.identity, known=self.known | {marker.identity})

    def prune(self, keep: int) -> Line:
        """Remove all but the last ``keep`` of the line; others in the folder, and links, stay. Returns what is left.

        One with files that are gone or of another size does not count, and the newest whose parameters are finite
        stays: a run may have to go back to it.
        """
        contents = Contents.of(self.folder)
        line = list(contents.line(self.newest))
        line += [entry for entry in contents.entries if entry.marker.identity == self.beside and entry not in line]
        kept, finite = 0, None
        for entry in line:
            is_good = entry.problem(verified=False) is None
            is_last_finite = finite is None and is_good and entry.marker.finite
            if kept >= keep and not is_last_finite and not entry.directory.is_symlink():
                discard(entry.directory)
            kept += is_good
            if is_last_finite:
                finite = entry.marker.identity
        return replace(self, beside=finite)

    def _require_alone(self) -> Contents:
        contents = Contents.of(self.folder)
        strangers = [entry.directory for entry in contents.entries if entry.marker.identity not in self.known]
        if strangers:
            raise ConfigError(
                f"Another job has committed {strangers[-1]} since this one saved or loaded there last, and latest() "
                "can name one of the two only. Give each run a folder of its own, or load that checkpoint to go on "
                "from it."
            )
        return contents


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

        Raises PolyshardError: a file is gone or shorter: something else works in the directory, or the ranks see
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
        """Let ``target`` be the checkpoint. Raises ConfigError: it is one already."""
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
            sync_directory(target.parent)
        except OSError:
            # A save that raises must leave no checkpoint.
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

    Raises ConfigError: it cannot be a folder.
    """
    make_folder(folder)
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
    """Remove a save at ``target`` that did not end."""
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


class JobLock:
    """This process's claim to a folder, until ``release`` or its end, of whatever kind.

    The system releases a lock with the process that holds it, so that nothing is left of a job that was killed. The
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
        with naming(path):
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
        write_at(descriptor, [memoryview(render({"process": mine, "since": int(time.time())}))], 0, self._path)
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
            entry = an_object(parse(os.pread(descriptor, _MOST, 0)), "the lock")
            process, since = a_list(entry["process"], "process"), a_count(entry["since"], "since")
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
    """Releases a lock in a forked child. Not a method: that would keep the lock for good."""

    def __init__(self, lock: weakref.ref[JobLock]) -> None:
        self._lock = lock

    def __call__(self) -> None:
        lock = self._lock()
        if lock is not None:
            lock.release()


def _identity() -> list[Any]:
    """Of this process, and of no other one: numbers of processes are used again."""
    began = boot = ""
    with suppress(OSError, IndexError):
        # The name in brackets may have blanks; the start is the 22nd field.
        began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [socket.gethostname(), os.getpid(), began, boot]
