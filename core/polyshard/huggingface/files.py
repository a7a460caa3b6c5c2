"""Which tensors a folder of safetensors files holds, and where in which file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, StateError
from .dtypes import dtype_called, name_of

#: What Transformers calls them.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Headers are padded to a multiple of this, so that tensors lie where their dtype needs it.
_ALIGNMENT = 8
#: A length that no header has; what is read as one comes from a file of another kind.
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a file: row-major, without gaps."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Where its first byte lies in the file."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors of a checkpoint, by name."""

    path: Path
    tensors: Mapping[str, SavedTensor]

    def identity(self) -> list[Any]:
        """What is the same for ranks that were given the same checkpoint, whatever its folder is called there."""
        return [[each.name, str(each.dtype), each.shape, each.file.name, each.offset] for each in self.tensors.values()]


def open_saved(path: Path) -> Saved:
    """Read the headers of the checkpoint at ``path``: a folder, one ``.safetensors`` file, or an index of several.

    Raises:
        ConfigError: there is no such checkpoint.
        StateError: a file of it is gone, too short, or no safetensors file.
    """
    if path.is_dir():
        for name in (WEIGHTS, INDEX):
            if (path / name).is_file():
                return open_saved(path / name)
        alone = sorted(path.glob("*.safetensors"))
        if len(alone) == 1:
            return open_saved(alone[0])
        raise ConfigError(
            f"{path} holds neither '{WEIGHTS}' nor '{INDEX}'"
            + (f", but {len(alone)} other .safetensors files: give one of them" if alone else "")
            + ". Pass the folder that save_pretrained wrote, or one of its files."
        )
    if not path.is_file():
        raise ConfigError(
            f"There is no checkpoint at {path}. Pass a folder on this machine that save_pretrained wrote, or one of "
            "its files; a name on the Hub is downloaded by huggingface_hub.snapshot_download first."
        )
    if path.suffix == ".safetensors":
        return Saved(path, _read_header(path))
    return Saved(path, _read_index(path))


def _read_index(path: Path) -> dict[str, SavedTensor]:
    try:
        weight_map: Any = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(file): None for file in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is no index of safetensors files ({type(error).__name__}: {error}).") from error
    absent = [file for file in files if not (path.parent / file).is_file()]
    if absent:
        raise StateError(f"{path} names files that are not there: {', '.join(absent)}. Copy the whole checkpoint.")
    found: dict[str, SavedTensor] = {}
    for file in files:
        held = _read_header(path.parent / file)
        lacking = [name for name, owner in weight_map.items() if owner == file and name not in held]
        if lacking:
            raise StateError(
                f"{path} says that {file} holds {', '.join(map(repr, lacking))}, which it does not: the files are of "
                "several checkpoints. Copy the whole checkpoint again."
            )
        found.update({name: tensor for name, tensor in held.items() if weight_map.get(name, file) == file})
    return found


def _read_header(path: Path) -> dict[str, SavedTensor]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _LONGEST_HEADER
        if length >= _LONGEST_HEADER or 8 + length > size:
            raise StateError(f"{path} is no safetensors file, or was cut off: it has {size:,} bytes.")
        text = stream.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        header.pop("__metadata__", None)
        entries = {
            name: (each["dtype"], tuple(map(int, each["shape"])), *map(int, each["data_offsets"]))
            for name, each in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"The header of {path} cannot be read ({type(error).__name__}: {error}).") from error
    found = {}
    for name, (kind, shape, begin, end) in entries.items():
        dtype = dtype_called(kind)
        if dtype is None:
            raise StateError(f"'{name}' in {path} has the dtype {kind}, which this torch does not have.")
        tensor = SavedTensor(name, dtype, shape, path, 8 + length + begin)
        if end - begin != tensor.nbytes or begin < 0 or 8 + length + end > size:
            raise StateError(
                f"{path} is damaged or was cut off: '{name}' should lie in bytes {8 + length + begin:,} to "
                f"{8 + length + end:,} of {size:,}. Copy it again."
            )
        found[name] = tensor
    return found


def header_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], file: Path
) -> tuple[bytes, list[SavedTensor]]:
    """The beginning of a file of ``tensors`` in this order, and where each will lie.

    Wider dtypes must come first, so that each tensor begins at a multiple of its element's size.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed, cursor = [], 0
    for name, (dtype, shape) in tensors.items():
        tensor = SavedTensor(name, dtype, shape, file, cursor)
        entries[name] = {
            "dtype": name_of(dtype),
            "shape": list(shape),
            "data_offsets": [cursor, cursor + tensor.nbytes],
        }
        cursor += tensor.nbytes
        placed.append(tensor)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = 8 + len(text)
    moved = [SavedTensor(each.name, each.dtype, each.shape, file, begin + each.offset) for each in placed]
    return struct.pack("<Q", len(text)) + text, moved
