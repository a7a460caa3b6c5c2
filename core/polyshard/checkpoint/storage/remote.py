"""Object stores, behind the filesystems of ``fsspec``: no renames, no locks, no folders, and ranges that are read.

[Note: one job on an object store]
The lock is an object that names a process. A job takes it where there is none, or where that process is not seen to
run: it may have been killed. So two jobs can both believe to have the folder, and each first writes, then looks: the
one that takes the lock writes it, and then removes what has no marker; the one that commits writes its marker, and then
looks whether the lock still names it. Where a store answers with what was written last, the first sees the marker and
leaves that checkpoint alone, or the second sees the lock and takes its marker back.
"""

from __future__ import annotations

import errno
import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from typing_extensions import override

from ...errors import ConfigError, PolyshardError
from ...io.files import damaged
from .contract import (
    LOCK,
    MARKER,
    MOST_OF_LOCK,
    URL,
    Attempt,
    Holder,
    InputFile,
    JobLock,
    OutputFile,
    Storage,
    is_written,
)

#: There as long as a save goes on.
_SAVING = "SAVING"
#: The name of an attempt's directory: that of the step, and the first digits of its identity. Others are nobody's to
#: remove.
_DIRECTORY = re.compile(r"step-\d{8,}(?:\.\d+)?\.[0-9a-f]{12}")
_DIGITS = 12
#: Seconds between what is tried again.
_PAUSES = (0.0, 0.1, 1.0)
#: A file up to here is sent by one request.
_MOST_AT_ONCE = 16 << 20
#: Bytes behind which a rank says that it still writes.
_SHOWN_NBYTES = 128 << 20
#: Attempts of this process that have not ended.
_LIVE: set[URL] = set()
#: Locks of this process, by their folders.
_CLAIMS: dict[URL, weakref.WeakSet[RemoteJobLock]] = {}
_MUTEX = threading.Lock()
_BEATS = itertools.count()


def filesystem_of(url: URL) -> tuple[Any, str]:
    """The filesystem of ``url``, and what it calls it. Settings are those that fsspec reads from its configuration.

    Raises ConfigError: fsspec, or its package for this scheme, is not installed; or there is none.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"{url} needs fsspec: install polyshard[remote], or give a path.") from error
    try:
        filesystem, path = url_to_fs(str(url))
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"fsspec has no filesystem for {url}: {error}. Install its package for that scheme, or give a path."
        ) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(url)) from error
    return filesystem, path


@contextmanager
def _reached(url: URL, *, looks: bool = False) -> Iterator[tuple[Any, str]]:
    """The filesystem of ``url``, and what it calls it; errors of the body are OSErrors that name ``url``.

    ``looks``: whether listings are asked for, of which filesystems keep older ones.
    """
    filesystem, path = filesystem_of(url)
    try:
        if looks:
            filesystem.invalidate_cache(path)
        yield filesystem, path
    except PolyshardError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object, or bucket", str(url)) from error
    except Exception as error:
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise OSError(number, text, str(url)) from error


class RemoteStorage(Storage[URL]):
    """It needs of a store that an object appears whole or not at all, and that reads, listings and removals are of what
    was written last.
    """

    errors_pass = True

    @override
    def exists(self, path: URL) -> bool:
        # The filesystem's own `exists` says no where it could not ask.
        return _asked(path, lambda filesystem, name: filesystem.info(name), looks=True) is not None

    @override
    def names(self, folder: URL) -> list[str]:
        return sorted(self._listed(folder))

    @override
    def sizes(self, directory: URL) -> dict[str, int]:
        return {name: int(each["size"]) for name, each in self._listed(directory).items() if each["type"] == "file"}

    @contextmanager
    @override
    def opened(self, directory: URL, name: str, size: int | None = None) -> Iterator[InputFile]:
        info = _asked(directory / name, lambda filesystem, called: filesystem.info(called), looks=True)
        if info is not None and info["type"] != "file":
            raise damaged(directory, f"'{name}' is no file")
        found = None if info is None else int(info["size"])
        yield _Input(directory, name, _required(directory, name, found, size))

    @override
    def require_files(self, directory: URL, sizes: Mapping[str, int]) -> None:
        found = self.sizes(directory)
        for name, size in sizes.items():
            _required(directory, name, found.get(name), size)

    @contextmanager
    @override
    def created(self, path: URL, size: int) -> Iterator[OutputFile]:
        if size <= _MOST_AT_ONCE:
            content = bytearray()
            yield _Output(self, path, content.extend)
            self.write_whole(path, bytes(content))
            return
        with _reached(path) as (filesystem, name):
            file = filesystem.open(name, "wb")
        try:
            output = _Output(self, path, file.write)
            yield output
            with _reached(path):
                file.close()
            output.end()
        except BaseException:
            # Closing it would send the rest; parts that were sent are to be forgotten.
            with suppress(Exception):
                file.discard()
            with suppress(AttributeError):
                file.closed = True
            raise

    @override
    def write_whole(self, path: URL, content: bytes) -> None:
        with _reached(path) as (filesystem, name):
            try:
                filesystem.pipe_file(name, content)
            except FileNotFoundError:
                # A filesystem with folders. Not the outermost one: that is a bucket, which nobody wants by mistake.
                first, *names = name.lstrip("/").split("/")[:-1]
                outer = name[: name.index(first)] + first
                for inner in itertools.accumulate(names, "{}/{}".format, initial=outer):
                    if inner != outer and not filesystem.isdir(inner):
                        filesystem.mkdir(inner, create_parents=False)
                filesystem.pipe_file(name, content)

    @override
    def remove(self, path: URL) -> None:
        _asked(path, lambda filesystem, name: filesystem.rm_file(name))

    @override
    def remove_tree(self, directory: URL) -> None:
        with suppress(OSError):
            found = self._listed(directory)
            own = [name for name, each in found.items() if is_written(name) and each["type"] == "file"]
            everything = len(own) == len(found)
            with _reached(directory) as (filesystem, called):
                # With the folder itself, of which some filesystems have such.
                filesystem.rm(called if everything else [f"{called}/{name}" for name in own], recursive=everything)

    @override
    def discard(self, directory: URL) -> None:
        self.remove(directory / MARKER)
        self.remove_tree(directory)

    @override
    def claim(self, folder: URL) -> RemoteJobLock:
        return RemoteJobLock(self, folder)

    @contextmanager
    @override
    def attempt(self, folder: URL, name: str) -> Iterator[RemoteAttempt]:
        for each in self.names(folder):
            directory = folder / each
            if _DIRECTORY.fullmatch(each) and directory not in _LIVE and not self.exists(directory / MARKER):
                self.remove_tree(directory)
        with closing(RemoteAttempt(self, folder, name)) as attempt:
            self.beat(attempt.path)
            yield attempt

    @override
    def beat(self, attempt: URL) -> None:
        self.write_whole(attempt / _SAVING, b"%20d" % next(_BEATS))

    @override
    def beat_of(self, attempt: URL) -> object:
        try:
            return _asked(attempt / _SAVING, lambda filesystem, name: filesystem.cat_file(name))
        except OSError as error:
            return str(error)

    def _listed(self, folder: URL) -> dict[str, Any]:
        found = _asked(folder, lambda filesystem, name: (name, filesystem.ls(name, detail=True)), looks=True)
        called, entries = found or ("", [])
        # Some list the folder itself, too.
        below = ((each["name"].rstrip("/"), each) for each in entries)
        return {path.rpartition("/")[2]: each for path, each in below if path.strip("/") != called.strip("/")}


def _asked(url: URL, ask: Callable[[Any, str], Any], *, looks: bool = False) -> Any:
    """What ``ask`` gives of a filesystem and its name for ``url``; None where nothing is there."""
    try:
        with _reached(url, looks=looks) as (filesystem, name):
            return ask(filesystem, name)
    except FileNotFoundError:
        return None


def _required(directory: URL, name: str, found: int | None, wanted: int | None) -> int:
    """The size of a file. Raises CheckpointDamagedError: it is not there, or of another size than ``wanted``."""
    if found is None:
        raise damaged(directory, f"'{name}' is gone")
    if wanted is not None and found != wanted:
        raise damaged(directory, f"'{name}' has {found:,} bytes, and had {wanted:,} when it was committed")
    return found


class _Input:
    def __init__(self, directory: URL, name: str, size: int) -> None:
        self.size = size
        self._directory = directory
        self._name = name

    def read(self, pieces: Sequence[memoryview], at: int) -> None:
        total = sum(map(len, pieces))
        if not total:
            return
        place = self._directory / self._name
        got = _asked(place, lambda filesystem, name: filesystem.cat_file(name, start=at, end=at + total))
        if got is None:
            raise damaged(self._directory, f"'{self._name}' is gone")
        content = memoryview(got)
        if len(content) != total:
            raise damaged(self._directory, f"'{self._name}' became shorter while it was read")
        for piece in pieces:
            piece[:] = content[: len(piece)]
            content = content[len(piece) :]


class _Output:
    """Takes bytes in their order alone.

    No listing has a large file before its end: what grows instead is an object beside it, for those who wait.
    """

    def __init__(self, storage: RemoteStorage, path: URL, append: Callable[[memoryview], object]) -> None:
        self._storage = storage
        self._path = path
        self._beside = URL(f"{path}.part")
        self._append = append
        self._shown = 0

    def write(self, block: Sequence[memoryview], at: int) -> None:
        pass

    def follow(self, block: Sequence[memoryview], at: int) -> None:
        with _reached(self._path):
            for piece in block:
                self._append(piece)
        if at // _SHOWN_NBYTES > self._shown:
            self._shown = at // _SHOWN_NBYTES
            self._storage.write_whole(self._beside, b"." * self._shown)

    def end(self) -> None:
        if self._shown:
            self._storage.remove(self._beside)


class RemoteAttempt(Attempt[URL]):
    """A directory with a name that no other save has: what it holds is never written over."""

    def __init__(self, storage: RemoteStorage, folder: URL, name: str) -> None:
        super().__init__()
        self.path = self.target = folder / f"{name}.{self.identity[:_DIGITS]}"
        self._storage = storage
        _LIVE.add(self.path)

    @override
    def commit(self, marker: bytes) -> None:
        path = self.path / MARKER
        self._require_claim()
        try:
            self._storage.write_whole(path, marker)
        except OSError:
            # What got lost may have been the answer.
            if not self._has(marker):
                raise
        self.committed = True
        try:
            self._require_claim()
        except BaseException:
            self._storage.remove(path)
            self.committed = False
            raise
        # The others wait until it is gone.
        for pause in _PAUSES:
            with suppress(OSError):
                self._storage.remove(self.path / _SAVING)
                return
            time.sleep(pause)

    @override
    def close(self) -> None:
        _LIVE.discard(self.path)
        if not self.committed and not self.stays:
            self._storage.remove_tree(self.path)

    def _has(self, marker: bytes) -> bool:
        try:
            return self._storage.read_whole(self.path, MARKER, len(marker)) == marker
        except (PolyshardError, OSError):
            return False

    def _require_claim(self) -> None:
        """Raise ConfigError where another job took the folder, or may have."""
        folder = self.path.parent
        holder = _holder_of(folder)
        if holder is None:
            raise ConfigError(
                f"{folder / LOCK} was removed while this job saved there, so that another job could have taken the "
                "folder. Save again, and leave it there until the job ends."
            )
        if not holder.is_this_process:
            raise holder.refused(folder)


class RemoteJobLock(JobLock[URL]):
    """This process's claim to a folder, as an object says. It stays when the process is killed."""

    def __init__(self, storage: RemoteStorage, folder: URL) -> None:
        """Claim ``folder``.

        Raises ConfigError: another process is seen to hold it, or took it from this one; OSError: no answer came.
        """
        self.folder = folder
        self._storage = storage
        holder = _holder_of(folder)
        self._wrote = holder is None or not holder.is_this_process
        with _MUTEX:
            claims = _CLAIMS.setdefault(folder, weakref.WeakSet())
            if holder is not None and self._wrote and (holder.runs_here or len(claims)):
                raise holder.refused(folder)
        if self._wrote:
            storage.write_whole(folder / LOCK, Holder.content())
        with _MUTEX:
            claims.add(self)

    @property
    @override
    def held(self) -> bool:
        holder = _holder_of(self.folder)
        return holder is not None and holder.is_this_process

    @property
    @override
    def removed(self) -> bool:
        return self._wrote and _holder_of(self.folder) is None

    @override
    def release(self) -> None:
        with _MUTEX:
            claims = _CLAIMS.get(self.folder, weakref.WeakSet())
            claims.discard(self)
            last = not len(claims)
        # A lock that stays keeps nobody out once this process has ended.
        with suppress(OSError, PolyshardError):
            if last and self.held:
                self._storage.remove(self.folder / LOCK)


def _holder_of(folder: URL) -> Holder | None:
    raw = _asked(folder / LOCK, lambda filesystem, name: filesystem.cat_file(name, start=0, end=MOST_OF_LOCK))
    return None if raw is None else Holder.of(raw)
