"""An object store as cloud ones are, behind fsspec: ``store://...``. It fails, delays and dies where a test says so.

Objects are files of one flat folder, so that processes can share it. An object is there when all of it was sent, and
listings are cached by the filesystem, which forgets one where it is told to or changes something itself.
"""

from __future__ import annotations

import os
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class KilledError(BaseException):
    """The process is gone: no handler for errors may see it."""


class ObjectStore(AbstractFileSystem):
    """Each request calls ``before`` first, and ``behind`` when it was carried out, with what it does and the object."""

    protocol = "store"
    cachable = False
    folder: ClassVar[Path]
    before: ClassVar[Callable[[str, str], None]]
    behind: ClassVar[Callable[[str, str], None]]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with _request("info", path):
            file = _file_of(path)
            if file.exists():
                return {"name": path, "size": file.stat().st_size, "type": "file"}
            if any(key.startswith(f"{path}/") for key in _keys()):
                return {"name": path, "size": 0, "type": "directory"}
            raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        with _request("ls", path):
            if path not in self.dircache:
                found: dict[str, dict[str, Any]] = {}
                for key in _keys():
                    if key.startswith(f"{path}/"):
                        name, _, rest = key.removeprefix(f"{path}/").partition("/")
                        kind = "directory" if rest else "file"
                        size = 0 if rest else _file_of(key).stat().st_size
                        found[name] = {"name": f"{path}/{name}", "size": size, "type": kind}
                if not found:
                    raise FileNotFoundError(path)
                self.dircache[path] = list(found.values())
            listed = self.dircache[path]
            return listed if detail else [each["name"] for each in listed]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        with _request("get", path), _file_of(path).open("rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        with _request("put", path):
            put(path, bytes(value))

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        with _request("delete", path):
            _file_of(path).unlink()

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        raise PermissionError(f"who may write here may not make a bucket: {path}")

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> _Upload:
        return _Upload(self, path, mode, 5 << 20)


class _Upload(AbstractBufferedFile):
    """In parts, which become an object together."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        with _request("part", self.path):
            self.parts.append(self.buffer.getvalue())
        if final:
            with _request("put", self.path):
                put(self.path, b"".join(self.parts))
        return True


class Memory(MemoryFileSystem):
    """fsspec's own, which is disturbed in the same way."""

    def info(self, path: str, **kwargs: Any) -> Any:
        with _request("info", path):
            return super().info(path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        with _request("ls", path):
            return super().ls(path, detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        with _request("get", path):
            return super().cat_file(path, start, end, **kwargs)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        with _request("put", path):
            super().pipe_file(path, value, *args, **kwargs)

    def _rm(self, path: str) -> None:
        with _request("delete", path):
            super()._rm(path)


class WithFolders(LocalFileSystem):
    """Where a folder must be made before something is written into it: ``folders:///tmp/...``."""

    protocol = "folders"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("folders://"))


@contextmanager
def _request(kind: str, path: str) -> Iterator[None]:
    ObjectStore.before(kind, path)
    yield
    ObjectStore.behind(kind, path)


def _file_of(path: str) -> Path:
    return ObjectStore.folder / urllib.parse.quote(path, safe="")


def _keys() -> list[str]:
    return sorted(urllib.parse.unquote(name) for name in os.listdir(ObjectStore.folder) if not name.startswith(".tmp"))


def put(path: str, content: bytes) -> None:
    temporary = ObjectStore.folder / f".tmp-{os.getpid()}-{threading.get_ident()}"
    temporary.write_bytes(content)
    temporary.replace(_file_of(path))


def objects(scheme: str = "store") -> dict[str, bytes]:
    """All that the store has."""
    if scheme == "memory":
        return {key.lstrip("/"): each.getvalue() for key, each in Memory.store.items()}
    return {key: _file_of(key).read_bytes() for key in _keys()}


def undisturbed(kind: str, path: str) -> None:
    """A request that is carried out."""


@contextmanager
def disturbed(
    before: Callable[[str, str], None] = undisturbed, behind: Callable[[str, str], None] = undisturbed
) -> Iterator[None]:
    ObjectStore.before, ObjectStore.behind = before, behind
    try:
        yield
    finally:
        ObjectStore.before = undisturbed


class Counting:
    """Counts requests, of all threads, and calls ``then(turn)`` with each one's number."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.requests: list[tuple[str, str]] = []
        self._then = then
        self._lock = threading.Lock()

    def __call__(self, kind: str, path: str) -> None:
        with self._lock:
            self.requests.append((kind, path))
            turn = len(self.requests) - 1
        self._then(turn)


@pytest.fixture
def store(tmp_path: Path) -> type[ObjectStore]:
    """An empty store."""
    ObjectStore.folder = tmp_path / "objects"
    ObjectStore.folder.mkdir()
    ObjectStore.before, ObjectStore.behind = undisturbed, undisturbed
    fsspec.register_implementation("store", ObjectStore, clobber=True)
    return ObjectStore


@pytest.fixture
def memory() -> Iterator[type[Memory]]:
    """fsspec's filesystem in memory, emptied."""
    ObjectStore.before, ObjectStore.behind = undisturbed, undisturbed
    fsspec.register_implementation("memory", Memory, clobber=True)
    Memory.store.clear()
    Memory.pseudo_dirs[:] = [""]
    yield Memory
    Memory.store.clear()
    Memory.pseudo_dirs[:] = [""]
    fsspec.register_implementation("memory", MemoryFileSystem, clobber=True)
