"""Archives of ``torch.save``: one value each, as ``torch.distributed.checkpoint`` keeps them in its files.

An archive of a tensor is made of what stands before its elements, the elements, and what follows them, so that elements
go from memory to the file and back without a copy.
"""

from __future__ import annotations

import functools
import io
import math
from typing import Any

import numpy as np
import torch
from torch.utils.serialization import config

#: Of an archive in a file, and of the elements in it.
ALIGNMENT = 64


def of_value(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


class _Around:
    """A file for ``torch.save`` that takes all but the elements of a tensor."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, content: Any) -> int:
        self.parts[-1] += content
        return len(content)

    def seek(self, nbytes: int, whence: int) -> None:
        # In the place of the elements, which are not written.
        self.parts.append(bytearray())

    def flush(self) -> None: ...


@functools.lru_cache(maxsize=4096)
def around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What an archive has before and behind the elements of a tensor, which are contiguous, as in memory.

    The length of the first is a multiple of ``ALIGNMENT``. The elements have no CRC-32: it would stand before what it
    is computed of.
    """
    file = _Around()
    # Memory that nobody touches takes none: not ``torch.empty``, which may be told to fill it.
    storage = torch.UntypedStorage(math.prod(shape) * dtype.itemsize, device="cpu")  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)
    # Ranks agree on lengths, whatever a program set for files of its own.
    with torch.serialization.skip_data(), config.patch({"save.storage_alignment": ALIGNMENT}):  # type: ignore[attr-defined]
        torch.save(tensor, file)  # type: ignore[arg-type]
    head, tail = map(bytes, file.parts)
    return head, tail


def lengths(dtype: torch.dtype, sizes: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of the archives of tensors of ``sizes`` (``[tensors, dimensions]``): bytes before elements, and behind them.

    Returns shape ``[2, tensors]``.
    """
    if not len(sizes):
        return np.zeros((2, 0), np.int64)
    # Nearly all boxes of a tensor have one size, which is found without sorting them.
    others = (sizes != sizes[0]).any(axis=1)
    kinds, of_kind = np.unique(sizes[others], axis=0, return_inverse=True)
    numbers = np.zeros(len(sizes), np.int64)
    numbers[others] = of_kind.reshape(-1) + 1
    both = [tuple(map(len, around(dtype, tuple(each)))) for each in (sizes[0].tolist(), *kinds.tolist())]
    return np.array(both, np.int64)[numbers].T
