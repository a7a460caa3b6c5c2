"""Safetensors files: the tensors in them by name, their values when they are asked for, and headers to write."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from polyshard.checkpoint.encoding import MalformedError, a_shape, a_text, an_object, parse
from polyshard.errors import ConfigError, StateError
from polyshard.inspect import without_wrappers
from polyshard.io.files import naming
from polyshard.io.memory import SAFETENSORS_DTYPES, SAFETENSORS_NAMES
from polyshard.state.source import listed

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "polyshard_huggingface reads and writes files by safetensors: install polyshard's extra 'huggingface'",
        name=error.name,
    ) from error

#: What Transformers calls them.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Headers are padded to a multiple of this, so that tensors lie where their dtype needs it.
_ALIGNMENT = 8
#: Bytes of an index that is read: what the library allows the header of a file.
_LONGEST_INDEX = 100_000_000

#: The tensor of a name.
Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    name: str
    """Its name there, which may have what wrappers add."""


#: The tensors of a checkpoint, by name.
Saved = Mapping[str, SavedTensor]


def identity_of(saved: Saved) -> str:
    """Equal for ranks that were given the same checkpoint, whatever its folder is called there."""
    return repr([(name, each.dtype, each.shape, each.file.name) for name, each in saved.items()])


@contextmanager
def reading(saved: Saved) -> Iterator[Read]:
    """A function that gives the tensor of a name: memory of the file, which is read as far as it is used."""
    with ExitStack() as stack:
        files: dict[Path, Any] = {}

        def read(name: str) -> torch.Tensor:
            file = saved[name].file
            with naming(file):
                if file not in files:
                    files[file] = stack.enter_context(safe_open(file, "pt"))
                found: torch.Tensor = files[file].get_tensor(saved[name].name)
            return found

        yield read


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
    found = _read_header(path) if path.suffix == ".safetensors" else _read_index(path)
    return {without_wrappers(name): each for name, each in found.items()}


def _read_index(path: Path) -> Saved:
    try:
        size = path.stat().st_size
        if size > _LONGEST_INDEX:
            raise MalformedError(f"it has {size:,} bytes")
        weight_map = an_object(an_object(parse(path.read_bytes()), "it")["weight_map"], "weight_map")
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(a_text(file, f"the file of {name!r}"), []).append(name)
    except (MalformedError, KeyError) as error:
        raise StateError(f"{path} is no index of safetensors files ({type(error).__name__}: {error}).") from error
    outside = [file for file in files if os.path.isabs(file) or ".." in Path(file).parts]
    if outside:
        raise StateError(
            f"{path} names files outside of its folder: {listed(outside)}. Take the checkpoint from where you trust "
            "it, or put the files and the index into one folder."
        )
    absent = [file for file in files if not os.path.isfile(path.parent / file)]
    if absent:
        raise StateError(f"{path} names files that are not there: {listed(absent)}. Copy the whole checkpoint.")
    found: dict[str, SavedTensor] = {}
    for file, names in files.items():
        held = _read_header(path.parent / file)
        lacking = [name for name in names if name not in held]
        if lacking:
            raise StateError(
                f"{path} says that {file} holds {listed(lacking)}, which it does not: the files are of "
                "several checkpoints. Copy the whole checkpoint again."
            )
        found.update({name: tensor for name, tensor in held.items() if weight_map.get(name, file) == file})
    return found


def _read_header(path: Path) -> Saved:
    """The tensors in the safetensors file ``path``, by name. Raises StateError: it is none, or is damaged.

    The library reads it, and refuses bytes that are of no tensor, or of two.
    """
    try:
        with naming(path), safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            told = {name: (each.get_dtype(), a_shape(each.get_shape(), repr(name))) for name, each in slices.items()}
        with path.open("rb") as stream:
            # Of two entries with one name and the same bytes the library takes the last.
            parse(stream.read(int.from_bytes(stream.read(8), "little")))
    except (SafetensorError, MalformedError) as error:
        raise StateError(
            f"{path} is damaged, was cut off, or is no safetensors file: {error}. Copy it again."
        ) from error
    unknown = [name for name, (kind, _) in told.items() if kind not in SAFETENSORS_DTYPES]
    if unknown:
        kind = told[unknown[0]][0]
        raise StateError(f"'{unknown[0]}' in {path} has the dtype {kind}, which this torch does not have.")
    return {name: SavedTensor(SAFETENSORS_DTYPES[kind], shape, path, name) for name, (kind, shape) in told.items()}


def header_of(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a file of ``tensors``, where in the file each of them begins, and the file's size.

    Not by the library, which writes whole tensors of one process. Wider dtypes come first, so that each tensor begins
    at a multiple of its element's size.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda each: (-each[1][0].itemsize, each[0])):
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        kind = SAFETENSORS_NAMES[dtype]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + end
