"""Archives of ``torch.save``: one value each, as ``torch.distributed.checkpoint`` keeps them in its files.

An archive is a zip file whose members are not compressed. That of a tensor is made of what stands before its elements,
the elements, and what follows them, so that elements go from memory to the file and back without a copy.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from .._torch_private import rebuild_tensor

#: Of an archive in a file, and of the elements in it.
ALIGNMENT = 64
_FOLDER = "archive"
#: For sizes above 4 GiB, which a reader of all others knows, too.
_ZIP64 = 45
_MOST = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")


def of_value(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


@functools.lru_cache(maxsize=4096)
def around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What an archive has before and behind the elements of a tensor, which are contiguous, as in memory.

    The length of the first is a multiple of ``ALIGNMENT``. Members carry no CRC-32, as with
    ``torch.serialization.set_crc32_options(False)``: it would stand before what it is computed of.
    """
    numel = 1
    for size in shape:
        numel *= size
    nbytes = numel * dtype.itemsize
    head = b""
    entries = []
    for name, content in (("data.pkl", _pickled(dtype, shape, nbytes)), ("byteorder", b"little")):
        header, entry = _member(name, len(content), len(head), aligned=False)
        head += header + content
        entries.append(entry)
    header, entry = _member("data/0", nbytes, len(head), aligned=True)
    head += header
    entries.append(entry)
    at = len(head) + nbytes
    header, entry = _member("version", 2, at, aligned=False)
    tail = header + b"3\n"
    entries.append(entry)
    directory = b"".join(entries)
    start, stop = at + len(tail), at + len(tail) + len(directory)
    tail += directory
    tail += _END64.pack(b"PK\x06\x06", 44, _ZIP64, _ZIP64, 0, 0, len(entries), len(entries), len(directory), start)
    tail += _LOCATOR.pack(b"PK\x06\x07", 0, stop, 1)
    tail += _END.pack(b"PK\x05\x06", 0, 0, _MOST >> 16, _MOST >> 16, _MOST, _MOST, 0)
    return head, tail


def lengths(dtype: torch.dtype, sizes: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of the archives of tensors of ``sizes`` (``[tensors, dimensions]``): bytes before elements, and behind them.

    Returns shape ``[2, tensors]``.
    """
    if not len(sizes):
        return np.zeros((2, 0), np.int64)
    # Nearly all boxes of a tensor have one size, which is found without sorting them.
    others = (sizes != sizes[0]).any(axis=1)
    if not others.any():
        return np.array([list(map(len, around(dtype, tuple(sizes[0].tolist()))))] * len(sizes), np.int64).T
    kinds, of_kind = np.unique(sizes[others], axis=0, return_inverse=True)
    numbers = np.zeros(len(sizes), np.int64)
    numbers[others] = of_kind.reshape(-1) + 1
    both = [tuple(map(len, around(dtype, tuple(each)))) for each in (sizes[0].tolist(), *kinds.tolist())]
    return np.array(both, np.int64)[numbers].T


def _member(name: str, nbytes: int, at: int, *, aligned: bool) -> tuple[bytes, bytes]:
    """The headers before a member and in the directory. ``at``: the first byte of the former in the archive."""
    path = f"{_FOLDER}/{name}".encode()
    sizes = struct.pack("<2H2Q", 1, 16, nbytes, nbytes)
    if aligned:
        end = at + _LOCAL.size + len(path) + len(sizes) + 4
        padding = -end % ALIGNMENT
        sizes += struct.pack("<2s H", b"FB", padding) + b"Z" * padding
    local = _LOCAL.pack(b"PK\x03\x04", _ZIP64, 0, 0, 0, 0, 0, _MOST, _MOST, len(path), len(sizes)) + path + sizes
    place = struct.pack("<2H3Q", 1, 24, nbytes, nbytes, at)
    fields = (b"PK\x01\x02", _ZIP64, _ZIP64, 0, 0, 0, 0, 0, _MOST, _MOST, len(path), len(place), 0, 0, 0, 0, _MOST)
    return local, _CENTRAL.pack(*fields) + path + place


class _Storage:
    pass


class _Tensor:
    """Pickles as a tensor does in ``torch.save``."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._made_of = (dtype, shape)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        dtype, shape = self._made_of
        strides = torch.empty(shape, device="meta").stride()
        return rebuild_tensor, (_Storage(), 0, shape, strides, False, OrderedDict(), dtype)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, nbytes: int) -> None:
        super().__init__(file, protocol=2)
        self._nbytes = nbytes

    @override
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.UntypedStorage, "0", "cpu", self._nbytes) if isinstance(obj, _Storage) else None


def _pickled(dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> bytes:
    content = io.BytesIO()
    _Pickler(content, nbytes).dump(_Tensor(dtype, shape))
    return content.getvalue()
