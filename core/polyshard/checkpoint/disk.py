"""Files of a checkpoint, with errors that name them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointDamagedError

#: For the end of an error's message.
REMEDY = "Load the one that polyshard.checkpoint.latest(root, verify=True) names."
#: No file that is read whole is as large: each has some hundred bytes a tensor.
_MOST_WHOLE = 1 << 32
#: One call takes no more pieces, by the limit of Linux.
_MOST_PIECES = 1024


def damaged(directory: Path, what: str) -> CheckpointDamagedError:
    """The error that says of ``directory`` what is wrong with it. ``what`` begins with a file's name, quoted."""
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


@contextmanager
def opened(directory: Path, name: str, size: int | None = None) -> Iterator[tuple[int, int]]:
    """A descriptor of the file ``name`` and the file's size in bytes.

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
            told = os.fstat(descriptor)
            if not stat.S_ISREG(told.st_mode):
                raise damaged(directory, f"'{name}' is no file")
            if size is not None and told.st_size != size:
                raise damaged(directory, f"'{name}' has {told.st_size:,} bytes, and had {size:,} when it was committed")
            yield descriptor, told.st_size
        finally:
            os.close(descriptor)


def read_whole(directory: Path, name: str, size: int | None = None) -> bytes:
    """All of a small file.

    Raises:
        As ``opened``.
    """
    with opened(directory, name, size) as (descriptor, nbytes):
        if nbytes > _MOST_WHOLE:
            raise damaged(directory, f"'{name}' has {nbytes:,} bytes, more than any that was written")
        content = bytearray(nbytes)
        read_into(descriptor, memoryview(content), 0, directory, name)
        return bytes(content)


def read_into(descriptor: int, memory: memoryview, at: int, directory: Path, name: str) -> None:
    """Fill ``memory`` from byte ``at`` of the file on.

    Raises:
        CheckpointDamagedError: it ends before.
        OSError: reading failed.
    """
    done = 0
    with naming(directory / name):
        while done < len(memory):
            count = os.preadv(descriptor, [memory[done:]], at + done)
            if count == 0:
                raise damaged(directory, f"'{name}' ends at byte {at + done:,}")
            done += count


def write_at(descriptor: int, pieces: Sequence[memoryview], at: int, path: Path) -> None:
    """Write ``pieces`` one behind another from byte ``at`` of the file on.

    Raises:
        OSError: not all could be written; names ``path``.
    """
    left = list(pieces)
    with naming(path):
        while left:
            count = os.pwritev(descriptor, left[:_MOST_PIECES], at)
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left and count:
                left[0] = left[0][count:]


@contextmanager
def created(path: Path) -> Iterator[int]:
    """A descriptor to write the new file ``path``; all of it is on disk when the body is left.

    Raises:
        FileExistsError: something is there.
        OSError: writing failed, at the latest here; names ``path``.
    """
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write the new file ``path``, to be on disk when this returns.

    Raises:
        As ``created``.
    """
    with created(path) as descriptor:
        write_at(descriptor, [memoryview(content)] if content else [], 0, path)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` as durable as the files."""
    with naming(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
