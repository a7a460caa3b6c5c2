"""The operations that checkpoints need of a storage, and how one comes into being there.

[Note: the commit rule]
A save writes into a directory that no other save writes to. Its checkpoint exists when the marker is found under its
name, and the marker is the last that is written, by one rank, when all have written: a save that ends before leaves no
checkpoint. Local disk writes into a directory with another name, and gives it its name by a rename. An object store has
no rename: the directory has its name from the beginning, which no other save ever has.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from ...errors import ConfigError, PolyshardError
from ...io.files import damaged
from ..encoding import MalformedError, a_count, a_list, a_text, an_object, parse, render

#: Written last: a directory without it is a save that did not end.
MARKER = "COMMITTED"
#: Who saves into a folder.
LOCK = ".job-lock"
#: More is nothing that was written there.
MOST_OF_LOCK = 4096
#: What saves write into their directories. Other names there are the user's, whose files stay.
_WRITTEN = re.compile(
    r"(?:(?:__\d{1,9}_0\.distcp|rank-\d{5,9}\.bin)(?:\.part)?|manifest\.json|\.metadata|COMMITTED|SAVING|written-by-\d+"
    r"|given-up\.txt)(?:\.tmp)?",
    re.ASCII,
)
#: No file that is read whole is as large: each has some hundred bytes a tensor.
_MOST_WHOLE = 1 << 32


def is_written(name: str) -> bool:
    """Whether a save may have written the file ``name`` of its directory."""
    return _WRITTEN.fullmatch(name) is not None


class URL(str):
    """A folder or file on an object store, such as ``s3://bucket/run``: a string with the members of ``Path`` that name
    others.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> URL:
        return super().__new__(cls, text if text.endswith("://") else text.rstrip("/"))

    def __truediv__(self, name: str) -> URL:
        return URL(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> URL:
        return URL(self.rpartition("/")[0])

    def absolute(self) -> URL:
        return self

    def resolve(self) -> URL:
        return self


Place = Path | URL
#: What a function is given, and gives back.
AnyPlace = TypeVar("AnyPlace", Path, URL)
P = TypeVar("P", Path, URL)


class InputFile(Protocol):
    """A file that is read, by several threads."""

    @property
    def size(self) -> int:
        """In bytes."""

    def read(self, pieces: Sequence[memoryview], at: int) -> None:
        """Fill ``pieces`` one behind another from byte ``at`` on.

        Raises CheckpointDamagedError: the file is gone, or ends before.
        """


class OutputFile(Protocol):
    """A new file that is written in blocks."""

    def write(self, block: Sequence[memoryview], at: int) -> None:
        """Take the block that begins at byte ``at``. Threads call it, in any order."""

    def follow(self, block: Sequence[memoryview], at: int) -> None:
        """Behind ``write``: one thread calls it for each block, in the order of the file."""


class JobLock(ABC, Generic[P]):
    """This process's claim to a folder. Models of one process share it."""

    folder: P

    @property
    @abstractmethod
    def held(self) -> bool:
        """Whether others are kept from the folder still."""

    @property
    @abstractmethod
    def removed(self) -> bool:
        """Whether somebody removed the file of the lock that this process took."""

    @abstractmethod
    def release(self) -> None: ...


class Attempt(ABC, Generic[P]):
    """The directory of one save."""

    path: P
    """Where ranks write."""
    target: P
    """Where the checkpoint will be."""

    def __init__(self) -> None:
        self.identity = uuid.uuid4().hex
        """No other save has it."""
        self.committed = False
        self.stays = False
        """Set where others look there when it is given back: the next save removes it."""

    @abstractmethod
    def commit(self, marker: bytes) -> None:
        """Let ``target`` be the checkpoint, with ``marker``. An error leaves none.

        Raises ConfigError: another job is in the way.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the directory back, and remove it where it was not committed."""


class Storage(ABC, Generic[P]):
    """Errors are OSErrors that name the file, whatever a filesystem raises, unless a method says otherwise."""

    errors_pass: bool
    """Whether what raised one may succeed when it is asked again, as over a network."""

    @abstractmethod
    def exists(self, path: P) -> bool:
        """Whether there is a file, a folder or a link."""

    def sees(self, path: P) -> bool:
        """Whether ``path`` exists, or that cannot be told: what needs it raises then. Raises nothing."""
        try:
            return self.exists(path)
        except OSError:
            return True

    @abstractmethod
    def names(self, folder: P) -> list[str]:
        """What is in ``folder``, in order; nothing where it is none."""

    @abstractmethod
    def sizes(self, directory: P) -> dict[str, int]:
        """Bytes of each file."""

    @abstractmethod
    def opened(self, directory: P, name: str, size: int | None = None) -> AbstractContextManager[InputFile]:
        """The file ``name``.

        Raises CheckpointDamagedError: it is gone, is no file, or has another size than ``size``.
        """

    def require_files(self, directory: P, sizes: Mapping[str, int]) -> None:
        """Raise as ``opened`` where it would for one of these files."""
        for name, size in sizes.items():
            with self.opened(directory, name, size):
                pass

    @abstractmethod
    def created(self, path: P, size: int) -> AbstractContextManager[OutputFile]:
        """The new file ``path`` of ``size`` bytes; all of it is there to stay when the body is left."""

    @abstractmethod
    def write_whole(self, path: P, content: bytes) -> None:
        """Write the new file ``path``, which is there to stay when this returns."""

    def replace_whole(self, path: P, content: bytes) -> None:
        """As ``write_whole``; who reads ``path`` meanwhile sees what was there before, or ``content``."""
        self.write_whole(path, content)

    @abstractmethod
    def remove(self, path: P) -> None:
        """Remove a file; nothing where it is gone."""

    @abstractmethod
    def remove_tree(self, directory: P) -> None:
        """Remove what can be removed of an attempt's ``directory``. Raises nothing."""

    @abstractmethod
    def discard(self, directory: P) -> None:
        """Remove a checkpoint, but no link to one, nor what others put into it.

        It stops being one at once, whenever this is interrupted.
        """

    @abstractmethod
    def claim(self, folder: P) -> JobLock[P]:
        """Have ``folder``, made where missing, for this process alone.

        Raises ConfigError: another job has it, or it can be no folder.
        """

    @abstractmethod
    def attempt(self, folder: P, name: str) -> AbstractContextManager[Attempt[P]]:
        """A new attempt at a checkpoint with this name, or this name and an addition, in ``folder``, which is claimed.

        What saves left there that did not live to their end is removed first.
        """

    @abstractmethod
    def beat(self, attempt: P) -> None:
        """Let ``beat_of`` be another. ``attempt``: the path of one."""

    @abstractmethod
    def beat_of(self, attempt: P) -> object:
        """Something that changes where its rank is still there; None where the directory is gone. Raises nothing."""

    def read_whole(self, directory: P, name: str, size: int | None = None, most: int = _MOST_WHOLE) -> bytes:
        """All of a small file, of at most ``most`` bytes. Errors as ``opened``."""
        with self.opened(directory, name, size) as file:
            if file.size > most:
                raise damaged(directory, f"'{name}' has {file.size:,} bytes, more than any that was written")
            content = bytearray(file.size)
            file.read([memoryview(content)], 0)
            return bytes(content)

    def require_written(self, directory: P, least: Mapping[str, int]) -> None:
        """See that a save's files have as many bytes as ranks wrote.

        Raises PolyshardError: a file is gone or shorter: something else works in the directory, or the ranks see
        different file systems.
        """
        found = self.sizes(directory)
        for name, nbytes in least.items():
            if found.get(name, 0) < nbytes:
                raise PolyshardError(
                    f"'{name}' has {found.get(name, 0):,} of the {nbytes:,} bytes that were written to {directory}. "
                    "All ranks must see the same file system, and nothing else may change it."
                )


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a folder, as its lock says."""

    process: list[Any]
    since: int

    @classmethod
    def of(cls, raw: bytes) -> Holder:
        """That of a lock's content; nobody in particular where it says nothing."""
        process: list[Any] = []
        since = 0
        with suppress(MalformedError, KeyError):
            entry = an_object(parse(raw), "the lock")
            process, since = a_list(entry["process"], "process"), a_count(entry["since"], "since")
        return cls(process, since)

    @staticmethod
    def content() -> bytes:
        """What this process writes into a lock."""
        return render({"process": identity(), "since": int(time.time())})

    @property
    def is_this_process(self) -> bool:
        return self.process == identity()

    @property
    def runs_here(self) -> bool:
        """Whether it is a process of this machine that has not ended."""
        try:
            return self.process == identity(a_count(self.process[1], "pid")) and self.process[2] != ""
        except (MalformedError, IndexError):
            return False

    def refused(self, folder: Place) -> ConfigError:
        who = "another process"
        with suppress(MalformedError, IndexError):
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(self.since, 2**40)))
            who = f"process {a_count(self.process[1], 'pid')} on {a_text(self.process[0], 'host')!r}, since {when}"
        return ConfigError(
            f"Another job saves into {folder}: {who}. Give each run a folder of its own, or end that one: its "
            "lock ends with it."
        )


def identity(process: int | None = None) -> list[Any]:
    """Of a process of this machine, this one by default, and of no other one: numbers of processes are used again."""
    began = boot = ""
    with suppress(OSError, IndexError):
        # The name in brackets may have blanks; the start is the 22nd field.
        began = Path(f"/proc/{process or 'self'}/stat").read_text().rpartition(")")[2].split()[19]
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [socket.gethostname(), process or os.getpid(), began, boot]
