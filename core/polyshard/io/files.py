"""Files: opened, read and written with errors that name them; digests; and calls in a few threads."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from ..errors import CheckpointDamagedError, ConfigError, ConfigTypeError

#: For the end of an error's message.
REMEDY = "Load the one that polyshard.checkpoint.latest(root, verify=True) names."
#: One call takes no more pieces, by the limit of Linux.
_MOST_PIECES = 1024
#: Under which a manifest keeps them.
DIGEST = "xxh3_128"
_TEXT = re.compile(r"[0-9a-f]{32}", re.ASCII)
T = TypeVar("T")
#: More would not go faster than the disks and memory that they use.
MOST = 4


def damaged(directory: object, what: str) -> CheckpointDamagedError:
    """The error of a damaged ``directory``. ``what`` begins with a file's name, quoted."""
    return CheckpointDamagedError(f"{directory} is damaged: {what}. {REMEDY}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the system name ``path``: those of reads, writes and ``fsync`` do not by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file of this machine that is read, by several threads."""

    path: Path
    size: int
    """In bytes."""
    descriptor: int

    def read(self, pieces: Sequence[memoryview], at: int) -> None:
        """Fill ``pieces`` one behind another from byte ``at`` on.

        Raises CheckpointDamagedError: the file ends before; OSError: reading failed; names the file.
        """
        left = [piece for piece in pieces if len(piece)]
        with naming(self.path):
            while left:
                count = os.preadv(self.descriptor, left[:_MOST_PIECES], at)
                if count == 0:
                    raise damaged(self.path.parent, f"'{self.path.name}' became shorter while it was read")
                at += count
                _take_off(left, count)


@contextmanager
def opened(directory: Path, name: str, size: int | None = None) -> Iterator[OpenedFile]:
    """The file ``name``.

    Links are not followed, and what is no file is not opened for longer than it takes to see that: a name in a
    checkpoint must not lead out of it, nor wait for the writer of a pipe.

    Raises:
        CheckpointDamagedError: it is gone, is no file, or has another size than ``size``.
        OSError: the system refuses.
    """
    path = directory / name
    with naming(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise damaged(directory, f"'{name}' is gone") from error
        except OSError as error:
            if path.is_symlink():
                raise damaged(directory, f"'{name}' is a link, and must be a file") from error
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(directory, f"'{name}' is no file")
            if size is not None and status.st_size != size:
                raise damaged(
                    directory, f"'{name}' has {status.st_size:,} bytes, and had {size:,} when it was committed"
                )
            yield OpenedFile(path, status.st_size, descriptor)
        finally:
            os.close(descriptor)


def write_at(descriptor: int, pieces: Sequence[memoryview], at: int, path: Path) -> None:
    """Write ``pieces`` one behind another from byte ``at`` of the file on.

    Raises OSError: not all could be written; names ``path``.
    """
    left = [piece for piece in pieces if len(piece)]
    with naming(path):
        while left:
            count = os.pwritev(descriptor, left[:_MOST_PIECES], at)
            at += count
            _take_off(left, count)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` as durable as the files."""
    with naming(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _take_off(pieces: list[memoryview], count: int) -> None:
    while pieces and count >= len(pieces[0]):
        count -= len(pieces.pop(0))
    if count:
        pieces[0] = pieces[0][count:]


def digest_of(pieces: Iterable[memoryview]) -> str:
    """The xxh3 of 128 bits of the pieces, one behind another, in hexadecimal.

    Above 20 GB/s on a core, where sha256 has 1.5: a load reads no faster than it compares. Both find any damage; that
    nobody can make other bytes for a digest would protect nothing here, since whoever can change a file can change the
    digest as well.
    """
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def is_digest(text: str) -> bool:
    """Whether ``digest_of`` could have given ``text``."""
    return _TEXT.fullmatch(text) is not None


def carried_out(calls: Iterable[Callable[[], T]], count: int) -> Generator[T, None, None]:
    """What the calls return, in their order, each made in a thread; in the calling one where there is one core.

    No executor of ``concurrent.futures``: that takes no work once a program's main thread has ended, when a save in the
    background may still go on.

    ``calls``, about ``count``, are taken one by one in the calling thread, no more ahead than go on at once.
    """
    threads = min(MOST, os.cpu_count() or 1, count)
    if threads < 2:
        for call in calls:
            yield call()
        return
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
            future: Future[T] = Future()
            threading.Thread(target=_carry_out, args=(future, call), daemon=True).start()
            waiting.append(future)
        while waiting:
            yield waiting.popleft().result()
    finally:
        wait(waiting)


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def path_of(given: object, name: str) -> Path:
    """The argument ``name`` as a path. Raises ConfigTypeError: it is none; ConfigError: it is empty, or has a null."""
    if isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str):
        if os.fspath(given) == "":
            raise ConfigError(f"{name} is empty, and must name a folder. The current one is '.'.")
        if "\0" in os.fspath(given):
            raise ConfigError(f"{name} is {given!r}: no path has a null character.")
        return Path(given)
    none = " latest() returns None where a folder holds no checkpoint." if given is None else ""
    raise ConfigTypeError(f"{name} is {given!r}, and must be a path.{none}")
