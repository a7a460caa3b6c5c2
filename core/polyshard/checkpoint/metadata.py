"""``.metadata``, in which ``torch.distributed.checkpoint`` describes a directory: the same pickle, made by rows.

A save of many ranks has millions of chunks. Objects for each would take gigabytes and minutes, so one of each kind is
pickled, with marks in the place of its numbers, and the rows of a tensor are copies of that with theirs.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .._torch_private import StorageInfo
from .manifest import StoredTensor

#: The key in a saved state dict, as containers and names that lead there.
Path = tuple[str | int, ...]
#: A value that is no tensor: the number of its file, the first byte of its archive, and how many it has.
Bytes = tuple[int, int, int]
#: Rows that are made at once.
_ROWS = 1 << 16
#: Stand for numbers: no other takes eight bytes.
_FIRST = 1 << 62
_PUT, _GET, _POP = b"r", b"j", b"0"
_MARK, _DICT, _LIST, _SET_ITEMS, _APPENDS = b"(", b"}", b"]", b"u", b"e"
_PLACE = "\0place"


def key_of(path: Path) -> str:
    return ".".join(map(str, path))


def rendered(
    tensors: Mapping[Path, StoredTensor], values: Mapping[Path, Bytes], files: Sequence[str]
) -> Iterator[bytes]:
    """The pickle of a ``Metadata``, in pieces. ``files``: their names, by number."""
    memo = _Memo(files)
    yield from memo.beginning()
    whole = Metadata(_PLACE + "1", _PLACE + "2", _PLACE + "3")  # type: ignore[arg-type]
    before, between, beside, behind = _split(_opcodes(whole), (_PLACE + "1", _PLACE + "2", _PLACE + "3"))
    yield before + _DICT
    for path, stored in tensors.items():
        properties = TensorProperties(dtype=stored.dtype)
        described = TensorStorageMetadata(properties, torch.Size(stored.shape), _PLACE)  # type: ignore[arg-type]
        head, tail = _split(_opcodes(described), (_PLACE,))
        yield _MARK + memo.put(key_of(path)) + memo.shortened(head) + _LIST + _MARK
        yield from _chunks(memo, stored)
        yield _APPENDS + memo.shortened(tail) + _SET_ITEMS
    for path in values:
        yield _MARK + memo.put(key_of(path)) + _opcodes(BytesStorageMetadata()) + _SET_ITEMS
    yield between + _opcodes({key_of(path): path for path in (*tensors, *values)}) + beside + _DICT
    for path, stored in tensors.items():
        yield _MARK
        yield from _places(memo, key_of(path), stored)
        yield _SET_ITEMS
    for path, (file, at, nbytes) in values.items():
        index, info = MetadataIndex(key_of(path)), StorageInfo(files[file], at, nbytes)
        yield _MARK + memo.shortened(_opcodes(index)) + memo.shortened(_opcodes(info)) + _SET_ITEMS
    yield behind + b"."


class _Memo:
    """What rows name again and again, by number."""

    def __init__(self, files: Sequence[str]) -> None:
        """``files``: have the first numbers."""
        self._files = files
        size = torch.Size(())
        texts = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
        parts = [_opcodes(each) for each in (torch.Size, ChunkStorageMetadata, MetadataIndex, StorageInfo, *texts)]
        self._parts = {part: len(files) + number for number, part in enumerate(parts)}
        self._next = len(files) + len(parts)
        assert _opcodes(size).startswith(parts[0])

    def beginning(self) -> Iterator[bytes]:
        yield b"\x80\x02"
        for number, name in enumerate(self._files):
            yield _opcodes(name) + _PUT + struct.pack("<I", number) + _POP
        for part, number in self._parts.items():
            yield part + _PUT + struct.pack("<I", number) + _POP

    def put(self, text: str) -> bytes:
        """``text``, to be named by number from now on."""
        part = _opcodes(text)
        self._parts[part] = self._next
        self._next += 1
        return part + _PUT + struct.pack("<I", self._parts[part])

    def shortened(self, content: bytes, text: str | None = None) -> bytes:
        """``content`` with numbers in the place of parts. ``text``: of those that ``put`` was given, the only one."""
        own = [] if text is None else [_opcodes(text)]
        for part in (*own, *list(self._parts)[:11]):
            content = content.replace(part, _GET + struct.pack("<I", self._parts[part]))
        return content


def _chunks(memo: _Memo, stored: StoredTensor) -> Iterator[bytes]:
    ndim = len(stored.shape)
    marks = [_FIRST + number for number in range(2 * ndim)]
    row = memo.shortened(_opcodes(ChunkStorageMetadata(torch.Size(marks[:ndim]), torch.Size(marks[ndim:]))))
    yield from _rows(row, marks, np.concatenate([stored.offsets, stored.sizes], axis=1))


def _places(memo: _Memo, key: str, stored: StoredTensor) -> Iterator[bytes]:
    ndim = len(stored.shape)
    marks = [_FIRST + number for number in range(ndim + 3)]
    index = MetadataIndex(key, torch.Size(marks[:ndim]), marks[ndim])
    info = StorageInfo(_PLACE, marks[ndim + 1], marks[ndim + 2])
    row = memo.shortened(_opcodes(index), key) + memo.shortened(_opcodes(info))
    starts, lengths = stored.archives()
    columns = [*stored.offsets.T, np.arange(len(starts)), starts, lengths, stored.files]
    # The name of a file by its number: four bytes of its own kind.
    file = _GET + struct.pack("<I", 0xFFFFFFFF)
    row = row.replace(_opcodes(_PLACE), file)
    yield from _rows(row, marks, np.stack(columns, axis=1), file)


def _rows(
    row: bytes, marks: Sequence[int], numbers: np.ndarray[Any, Any], last: bytes | None = None
) -> Iterator[bytes]:
    """``row`` for each of ``numbers``, its columns in the place of ``marks``. ``last``: what the last one is put to."""
    places = [row.index(struct.pack("<q", mark)) for mark in marks]
    pattern = np.frombuffer(row, np.uint8)
    for start in range(0, len(numbers), _ROWS):
        some = numbers[start : start + _ROWS]
        rows = np.tile(pattern, (len(some), 1))
        for column, place in enumerate(places):
            rows[:, place : place + 8] = np.ascontiguousarray(some[:, column], "<i8").view(np.uint8).reshape(-1, 8)
        if last is not None:
            place = row.index(last) + 1
            rows[:, place : place + 4] = np.ascontiguousarray(some[:, -1], "<u4").view(np.uint8).reshape(-1, 4)
        yield rows.tobytes()


def _split(content: bytes, texts: Sequence[str]) -> list[bytes]:
    found = []
    for text in texts:
        before, _, content = content.partition(_opcodes(text))
        found.append(before)
    return [*found, content]


def _opcodes(value: Any) -> bytes:
    """The opcodes that make ``value``, which refer to nothing before them."""
    content = io.BytesIO()
    pickler = pickle.Pickler(content, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return content.getvalue()[2:-1]
