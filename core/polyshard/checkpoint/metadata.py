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
from .manifest import Path, StoredTensor

#: A value that is no tensor: the number of its file, the first byte of its archive, and how many it has.
Bytes = tuple[int, int, int]
#: Rows that are made at once.
_ROWS = 1 << 16
#: Stand for numbers: no other takes eight bytes.
_FIRST = 1 << 62
_PUT, _GET, _POP = b"r", b"j", b"0"
_MARK, _DICT, _LIST, _SET_ITEMS, _APPENDS = b"(", b"}", b"]", b"u", b"e"
_PLACE = "\0place"
#: In a row, for the key, and for the name of a file: of four bytes each, as all that is named by number.
_KEY, _FILE = _GET + b"\xfe\xff\xff\xff", _GET + b"\xff\xff\xff\xff"


def rendered(
    tensors: Mapping[Path, StoredTensor], values: Mapping[Path, Bytes], files: Sequence[str]
) -> Iterator[bytes]:
    """The pickle of a ``Metadata``, in pieces. ``files``: their names, by number."""
    memo = _Memo(files)
    yield from memo.beginning()
    whole = Metadata(_PLACE + "1", _PLACE + "2", _PLACE + "3")  # type: ignore[arg-type]
    before, between, beside, behind = _split(_opcodes(whole), (_PLACE + "1", _PLACE + "2", _PLACE + "3"))
    keys = {path: ".".join(map(str, path)) for path in (*tensors, *values)}
    kinds = {len(stored.shape) for stored in tensors.values()}
    chunks, places = ({ndim: made(ndim) for ndim in kinds} for made in (memo.chunk, memo.place))
    yield before + _DICT
    for path, stored in tensors.items():
        properties = TensorProperties(dtype=stored.dtype)
        described = TensorStorageMetadata(properties, torch.Size(stored.shape), _PLACE)  # type: ignore[arg-type]
        head, tail = _split(_opcodes(described), (_PLACE,))
        yield _MARK + memo.put(keys[path]) + head + _LIST + _MARK
        yield from _rows(*chunks[len(stored.shape)], np.concatenate([stored.offsets, stored.sizes], axis=1))
        yield _APPENDS + tail + _SET_ITEMS
    for path in values:
        yield _MARK + memo.put(keys[path]) + _opcodes(BytesStorageMetadata()) + _SET_ITEMS
    yield between + _opcodes({keys[path]: path for path in keys}) + beside + _DICT
    for path, stored in tensors.items():
        row, marks = places[len(stored.shape)]
        starts, lengths = stored.archives()
        columns = [*stored.offsets.T, np.arange(len(starts)), starts, lengths, stored.files]
        yield _MARK
        yield from _rows(row.replace(_KEY, memo.named(keys[path])), marks, np.stack(columns, axis=1), _FILE)
        yield _SET_ITEMS
    for path, (file, at, nbytes) in values.items():
        index, info = MetadataIndex(keys[path]), StorageInfo(files[file], at, nbytes)
        yield _MARK + _opcodes(index) + _opcodes(info) + _SET_ITEMS
    yield behind + b"."


class _Memo:
    """What rows name again and again, by number; and the rows of each number of dimensions."""

    def __init__(self, files: Sequence[str]) -> None:
        """``files``: have the first numbers."""
        self._files = files
        texts = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
        parts = [_opcodes(each) for each in (torch.Size, ChunkStorageMetadata, MetadataIndex, StorageInfo, *texts)]
        self._parts = {part: number for number, part in enumerate(parts, len(files))}
        self._keys: dict[str, bytes] = {}

    def beginning(self) -> Iterator[bytes]:
        yield b"\x80\x02"
        for number, name in enumerate(self._files):
            yield _opcodes(name) + _PUT + _number(number) + _POP
        for part, number in self._parts.items():
            yield part + _PUT + _number(number) + _POP

    def put(self, key: str) -> bytes:
        """``key``, which ``named`` gives from now on."""
        number = _number(len(self._files) + len(self._parts) + len(self._keys))
        self._keys[key] = _GET + number
        return _opcodes(key) + _PUT + number

    def named(self, key: str) -> bytes:
        return self._keys[key]

    def chunk(self, ndim: int) -> tuple[bytes, Sequence[int]]:
        """The row of a box, and the marks in it: first indices, and extents."""
        marks = [_FIRST + number for number in range(2 * ndim)]
        made = ChunkStorageMetadata(torch.Size(marks[:ndim]), torch.Size(marks[ndim:]))
        return self._shortened(_opcodes(made)), marks

    def place(self, ndim: int) -> tuple[bytes, Sequence[int]]:
        """The row of a box's place, and the marks in it: first indices, its number, the first byte, and how many."""
        marks = [_FIRST + number for number in range(ndim + 3)]
        index = MetadataIndex(_PLACE + "key", torch.Size(marks[:ndim]), marks[ndim])
        info = StorageInfo(_PLACE, marks[ndim + 1], marks[ndim + 2])
        row = self._shortened(_opcodes(index) + _opcodes(info))
        return row.replace(_opcodes(_PLACE + "key"), _KEY).replace(_opcodes(_PLACE), _FILE), marks

    def _shortened(self, content: bytes) -> bytes:
        """``content`` with numbers in the place of parts."""
        for part, number in self._parts.items():
            content = content.replace(part, _GET + _number(number))
        return content


def _number(number: int) -> bytes:
    return struct.pack("<I", number)


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
