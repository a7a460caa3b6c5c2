"""``.metadata`` of ``torch.distributed.checkpoint``: what a directory says that it holds, and whether that can be."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from .._torch_private import StorageInfo
from ..errors import StateError
from ..io.boxes import Box, overlapping
from ..io.files import damaged, opened
from ..io.memory import memory_of_machine
from ..state.source import Entry
from .encoding import MalformedError, a_shape, a_text, an_object, counts
from .manifest import DESCRIBED

#: What is read of it is at most so much larger than the file.
_GROWTH = 64


class _Object:
    """Stands for an object of any class, with its state, and executes nothing."""

    state: Any = None

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state


_KINDS = "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex"
#: What FileSystemWriter of torch 2.4 to 2.15 names there. Python 3.11.2 pickles members of enums by ``getattr``, and
#: 3.13.0 has paths in ``pathlib._local``.
_NAMES: Mapping[str, Any] = {
    name: type(name.rpartition(".")[2], (_Object,), {})
    for name in (
        *(f"torch.distributed.checkpoint.metadata.{kind}" for kind in _KINDS.split()),
        *(f"torch.distributed.checkpoint.metadata.{kind}" for kind in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"pathlib.{kind}Path" for kind in ("Posix", "Windows", "_local.Posix", "_local.Windows")),
        *(f"{StorageInfo.__module__}.{StorageInfo.__name__}", "torch.serialization._get_layout"),
        *("builtins.getattr", "__builtin__.getattr"),
    )
} | {"torch.Size": tuple, **{str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}}


class _Unpickler(pickle.Unpickler):
    """Raises StateError for all other names, and imports none."""

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        found = _NAMES.get(f"{module}.{name}")
        if found is None:
            raise StateError(
                f"names {module[:100]}.{name[:100]} in '{DESCRIBED}', which is no part of the metadata that torch "
                "writes there, and was not looked up. Save again by torch's FileSystemWriter."
            )
        return found


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    identity: str
    """The sha256 of the file."""
    tensors: Mapping[str, Entry]
    """By key. Boxes are disjoint, and none is without elements."""
    places: Mapping[tuple[str, Any], StorageInfo]
    """Where archives of ``torch.save`` lie, by key and offsets of a box, or None for a value that is no tensor."""
    paths: Mapping[str, tuple[str | int, ...]]
    """By key, the way to the value through dicts and lists of the state dict that was saved."""


def read_metadata(directory: Path) -> DcpMetadata:
    """What a directory of ``torch.distributed.checkpoint`` holds.

    Raises:
        StateError: it is no such directory, or names what is no part of the metadata; nothing of that is executed.
        CheckpointDamagedError: it contradicts itself.
        OSError: reading failed.
    """
    if not os.path.lexists(directory / DESCRIBED):
        raise StateError(
            f"{directory} was not written by torch.distributed.checkpoint: it has no file '{DESCRIBED}', or its save "
            "did not end. Name the directory that was checkpoint_id of the save."
        )
    with opened(directory, DESCRIBED) as file:
        if file.size > (most := memory_of_machine() // _GROWTH):
            told = f"{file.size:,} bytes; this machine can read {most:,}"
            raise StateError(f"{directory} has a '{DESCRIBED}' of {told}. Use a larger one.")
        data = bytearray(file.size)
        file.read([memoryview(data)], 0)
    try:
        found = _state_of(_Unpickler(io.BytesIO(data)).load(), "Metadata")
        places = dict(map(_place, an_object(found["storage_data"], "storage_data").items()))
        described = an_object(found["state_dict_metadata"], "state_dict_metadata")
        tensors: dict[str, Entry] = {}
        for key, each in described.items():
            nbytes: dict[Any, int] = {None: 0}
            if type(each).__name__ != "BytesStorageMetadata":
                tensors[key] = _tensor(_state_of(each, "TensorStorageMetadata"), f"'{a_text(key, 'a key'):.100}'")
                nbytes = {box.offsets: box.numel * tensors[key].dtype.itemsize for box in tensors[key].boxes}
            for offsets, least in nbytes.items():
                place = places.get((key, offsets))
                if place is None or place.length < least:
                    raise MalformedError(f"'{key:.100}' has {least:,} bytes at {offsets}, and for them {place}")
        paths = an_object(found["planner_data"] or {}, "planner_data")
        for key, path in paths.items():
            if type(path) is not tuple or not path or not {*map(type, path)} <= {str, int}:
                raise MalformedError(f"it has {path!r:.100} for the way to {key!r:.100}")
    except StateError as error:
        raise StateError(f"{directory} {error}") from error
    except Exception as error:
        why = str(error) if isinstance(error, MalformedError) else f"{type(error).__name__}: {str(error)[:80]}"
        raise damaged(directory, f"'{DESCRIBED}' cannot be what was written ({why})") from error
    paths = {key: path for key, path in paths.items() if key in described}
    return DcpMetadata(hashlib.sha256(data).hexdigest(), tensors, places, paths)


def _state_of(value: Any, kind: str) -> Any:
    if not isinstance(value, _Object) or type(value).__name__ != kind:
        raise MalformedError(f"it has {type(value).__name__} for {kind}")
    return value.state


def _place(item: tuple[Any, Any]) -> tuple[tuple[str, Any], StorageInfo]:
    index, info = _state_of(item[0], "MetadataIndex"), _state_of(item[1], StorageInfo.__name__)
    key, file = a_text(index["fqn"], "a key"), a_text(info["relative_path"], "a file")
    # No path: what it leads to must lie in the directory itself.
    if file in ("", ".", "..") or "\0" in file or os.path.basename(file) != file:
        raise MalformedError(f"'{key:.100}' is said to be in {file[:100]!r}, which is no file of the directory")
    if info.get("transform_descriptors"):
        raise MalformedError(f"'{key:.100}' is transformed, by extensions of FileSystemWriter")
    at, nbytes = counts([info["offset"], info["length"]], f"'{key:.100}'")
    return (key, index.get("offset")), StorageInfo(file, at, nbytes)


def _tensor(found: Any, what: str) -> Entry:
    shape, (dtype, *_) = a_shape(list(found["size"]), what), _state_of(found["properties"], "TensorProperties")
    corners = (_state_of(each, "ChunkStorageMetadata") for each in found["chunks"])
    # One under several ranks' numbers is one.
    both = dict.fromkeys(tuple(a_shape(list(each[name]), what) for name in ("offsets", "sizes")) for each in corners)
    boxes = [box for box in (Box(*each) for each in both) if box.numel]
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape) or box.overlap(Box.whole(shape)) != box:
            raise MalformedError(f"{what} of shape {shape} has a chunk at {box.offsets} of {box.sizes}")
    columns = np.array([(box.offsets, box.sizes) for box in boxes], np.int64)
    if len(boxes) > 1 and overlapping(columns[:, 0], columns[:, 1], shape):
        raise MalformedError(f"{what} has elements twice")
    return Entry(shape, dtype, boxes)
