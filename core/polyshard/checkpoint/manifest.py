"""``manifest.json`` and ``COMMITTED``: what the files of a checkpoint hold, and whether that can be."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointDamagedError, StateError
from ..io.boxes import Box, Numbers, overlapping
from ..io.files import DIGEST, REMEDY, damaged, is_digest
from ..io.memory import DTYPES, NAMES
from ..state.sharded import MODEL, OPTIMIZER
from ..state.source import listed
from .archive import ALIGNMENT, lengths
from .encoding import (
    MOST,
    Json,
    MalformedError,
    a_count,
    a_list,
    a_shape,
    a_text,
    an_object,
    checked,
    counts,
    decode,
    no_tensor,
    parse,
    render,
    tensor_entry,
)
from .storage import MARKER, Place, storage_of

NAME = "manifest.json"
#: What stock torch reads of a directory.
DESCRIBED = ".metadata"
#: Bytes of a file that have a digest of their own, and are read together.
BLOCK = 4 << 20
#: Of markers and manifests.
FORMAT = 4
#: The names of files with elements, by the formats that are read: 3 is that of polyshard 0.2.
_FILES = {3: re.compile(r"rank-\d{5,9}\.bin", re.ASCII), FORMAT: re.compile(r"__\d{1,9}_0\.distcp", re.ASCII)}
READ = tuple(_FILES)
_DIGEST = "sha256"
#: The key in a saved state dict, as containers and names that lead there.
Path = tuple[Any, ...]
_GROUPS = (OPTIMIZER, "param_groups")
#: Bytes: a hundred for each rank's file, and there are not more ranks than half a million.
_MOST = 64 << 20


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in files: boxes of it, each in row-major order. There may be one for each rank of the save."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: Numbers
    """First indices of each box, shape ``[boxes, dimensions]``."""
    sizes: Numbers
    """Extents, of the same shape."""
    files: Numbers
    """The number of each one's file, shape ``[boxes]``."""
    at: Numbers
    """The first byte of its elements there."""

    @property
    def nbytes(self) -> Numbers:
        """Of each box's elements."""
        found: Numbers = self.sizes.prod(axis=1) * self.dtype.itemsize
        return found

    @property
    def is_whole(self) -> bool:
        return int(self.sizes.prod(axis=1).sum()) == math.prod(self.shape)

    def box(self, number: int) -> Box:
        return Box(tuple(self.offsets[number].tolist()), tuple(self.sizes[number].tolist()))

    def boxes(self) -> list[Box]:
        return [self.box(number) for number in range(len(self.at))]

    def overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The number of each box that has elements of ``box``, and these."""
        low, high = np.maximum(self.offsets, box.offsets), np.add(box.offsets, box.sizes)
        common = np.minimum(self.offsets + self.sizes, high) - low
        for number in np.flatnonzero((common > 0).all(axis=1)).tolist():
            yield number, Box(tuple(low[number].tolist()), tuple(common[number].tolist()))

    def archives(self) -> tuple[Numbers, Numbers]:
        """The first byte of each box's archive in its file, and how many bytes it has."""
        heads, tails = lengths(self.dtype, self.sizes)
        return self.at - heads, heads + self.nbytes + tails

    def entry(self) -> dict[str, Json]:
        columns = {"offsets": self.offsets, "sizes": self.sizes, "files": self.files, "at": self.at}
        numbers = {name: column.reshape(-1).tolist() for name, column in columns.items()}
        return {"dtype": NAMES[self.dtype], "shape": list(self.shape), **numbers}


@dataclass(frozen=True, slots=True)
class StoredFile:
    size: int
    """In bytes."""
    blocks: tuple[str, ...]
    """The digest of every ``BLOCK`` bytes, the last one's of the rest."""


@dataclass(frozen=True)
class Manifest:
    directory: Place
    files: Mapping[str, StoredFile]
    stored: Mapping[Path, StoredTensor | Json]
    """By path: ``("model", name)``, ``("optimizer", "state", name, key)``, ``("optimizer", "param_groups", index,
    setting)``. What is no tensor is encoded."""
    aliases: Mapping[str, str]
    """Further names of what the model has, and the name in ``stored``."""
    kind: Any
    """The optimizer's class, or the classes of several as one; None where none was saved."""
    precision: Json
    extra: Json
    complete: bool
    within: Mapping[int, StoredTensor]
    """Tensors in encoded values, by the identity of their descriptions, which live as long."""

    @classmethod
    def read(cls, directory: Place, marker: Marker) -> Manifest:
        """That of ``directory``, which was committed with ``marker``.

        Raises:
            CheckpointDamagedError: it is not the one that was committed, or what was committed contradicts itself.
            OSError: it cannot be read.
        """
        content = storage_of(directory).read_whole(directory, NAME, marker.files[NAME])
        if hashlib.sha256(content).hexdigest() != marker.manifest:
            raise damaged(directory, f"'{NAME}' is not what was committed: its sha256 is another")
        with checked(directory, NAME):
            top = an_object(parse(content), "the manifest")
            if top["format"] != marker.format:
                raise MalformedError(f"it is of format {top['format']!r}, and 'COMMITTED' of format {marker.format}")
            names = _FILES[marker.format]
            known = {name: _file(name, each, names) for name, each in an_object(top["files"], "files").items()}
            nbytes = {name: each.size for name, each in known.items()}
            if {NAME: len(content), **nbytes} != {name: n for name, n in marker.files.items() if name != DESCRIBED}:
                raise MalformedError("its files are not those of 'COMMITTED'")
            read = _Tensors(known, complete=marker.complete)
            model = {name: read.tensor(each, name) for name, each in an_object(top["model"], "model").items()}
            aliases = an_object(top["aliases"], "aliases")
            for name, first in aliases.items():
                if name in model or first not in model:
                    raise MalformedError(f"'{name}' is said to be '{first}'")
            sizes = {name: math.prod(each.shape) for name, each in model.items()}
            sizes.update({name: sizes[first] for name, first in aliases.items()})
            stored: dict[Path, StoredTensor | Json] = {(MODEL, name): each for name, each in model.items()}
            kind = None if top["optimizer"] is None else _optimizer(top["optimizer"], read, sizes, stored)
            # Decoded without elements first: a rank must not find out when others have changed their models.
            an_object(decode(top["extra"], read.stand_in), "extra")
            for state in an_object(decode(top["precision"], read.stand_in), "precision").values():
                an_object(state, "precision")
            read.require_apart()
        precision, extra, within = top["precision"], top["extra"], read.within
        return cls(directory, known, stored, aliases, kind, precision, extra, marker.complete, within)

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        for path, stored in self.stored.items():
            if isinstance(stored, StoredTensor) and path[:2] != _GROUPS:
                yield ".".join(path), stored
        for stored in self.within.values():
            yield "a tensor in extra, precision or param_groups", stored

    def block_damaged(self, file: str, index: int) -> CheckpointDamagedError:
        """The error for a block whose content is not what was written."""
        low = index * BLOCK
        high = min(low + BLOCK, self.files[file].size)
        number = list(self.files).index(file)
        hit = [
            name
            for name, stored in self.tensors()
            if ((stored.files == number) & (stored.at < high) & (stored.at + stored.nbytes > low)).any()
        ]
        what = f", where {listed(hit)} lie" if hit else ""
        return damaged(
            self.directory,
            f"'{file}' holds something else than was written from byte {low:,} to {high:,}{what}: the digest differs",
        )


class _Tensors:
    """Takes descriptions of tensors, and sees that they fit the files."""

    def __init__(self, files: Mapping[str, StoredFile], *, complete: bool) -> None:
        self._numbers = {name: number for number, name in enumerate(files)}
        self._sizes = np.array([each.size for each in files.values()], np.int64)
        self._complete = complete
        self._taken: list[StoredTensor] = []
        self.within: dict[int, StoredTensor] = {}

    def stand_in(self, entry: Json) -> torch.Tensor:
        """Without elements, for a tensor in an encoded value, which must be whole; it is noted in ``within``."""
        stored = self.within[id(entry)] = self.tensor(entry, "a tensor in a value", 0)
        return torch.empty(0, dtype=stored.dtype)

    def tensor(self, entry: Json, name: str, most: int | None = None) -> StoredTensor:
        """One of the manifest's. ``most``: how many elements it has at most, where they are not all in the files.

        Raises MalformedError: its boxes are not what its shape says, or not in the files.
        """
        what = f"'{name}'"
        entry = an_object(entry, what)
        dtype, shape = DTYPES[a_text(entry["dtype"], what)], a_shape(entry["shape"], what)
        columns = self._of_format_3(entry, what, dtype) if "chunks" in entry else entry
        at = _column(columns["at"], what)
        boxes = (len(at), len(shape))
        files = _column(columns["files"], what)
        offsets, sizes = (_column(columns[each], what) for each in ("offsets", "sizes"))
        if len(files) != len(at) or not len(offsets) == len(sizes) == len(at) * len(shape):
            raise MalformedError(f"{what} has {len(at)} boxes with {len(files)} files and {len(sizes)} extents")
        stored = StoredTensor(dtype, shape, offsets.reshape(boxes), sizes.reshape(boxes), files, at)
        self._require_inside(stored, what)
        held, wanted = int(stored.sizes.prod(axis=1).sum()), math.prod(shape)
        missing = wanted - held
        if missing < 0 or (missing and (self._complete or (most is not None and wanted > most))):
            raise MalformedError(f"{what} of shape {shape} has {held} elements")
        if len(at) > 1 and overlapping(stored.offsets, stored.sizes, shape):
            raise MalformedError(f"{what} has elements twice")
        self._taken.append(stored)
        return stored

    def _of_format_3(self, entry: Mapping[str, Json], what: str, dtype: torch.dtype) -> dict[str, list[int]]:
        """What polyshard 0.2 wrote, a list for each box."""
        columns: dict[str, list[int]] = {"offsets": [], "sizes": [], "files": [], "at": []}
        for each in a_list(entry["chunks"], what):
            offsets, sizes, file, at, nbytes = a_list(each, what)
            if len(a_list(offsets, what)) != len(entry["shape"]) or file not in self._numbers:
                raise MalformedError(f"{what} has a chunk at {offsets!r} of {file!r}")
            if math.prod(counts(sizes, what)) * dtype.itemsize != nbytes:
                raise MalformedError(f"{what} has a chunk of {nbytes!r} bytes for {sizes} elements of {dtype}")
            columns["offsets"] += offsets
            columns["sizes"] += sizes
            columns["files"].append(self._numbers[file])
            columns["at"].append(at)
        return columns

    def _require_inside(self, stored: StoredTensor, what: str) -> None:
        outside = (stored.offsets + stored.sizes > np.array(stored.shape, np.int64)).any(axis=1)
        outside |= (stored.sizes == 0).any(axis=1)
        if outside.any():
            box = stored.box(int(outside.argmax()))
            raise MalformedError(f"{what} of shape {stored.shape} has a box at {box.offsets} of {box.sizes}")
        if math.prod(stored.shape) * stored.dtype.itemsize >= MOST:
            raise MalformedError(f"{what} has the shape {stored.shape}, which no file has room for")
        unknown = stored.files >= len(self._sizes)
        if not unknown.any():
            unknown = (stored.at % ALIGNMENT != 0) | (stored.at + stored.nbytes > self._sizes[stored.files])
        if unknown.any():
            number = int(unknown.argmax())
            raise MalformedError(f"{what} is said to lie at byte {stored.at[number]} of file {stored.files[number]}")

    def require_apart(self) -> None:
        """Raise MalformedError where two boxes share bytes: a small file would become any amount of memory."""
        if not self._taken:
            return
        files = np.concatenate([each.files for each in self._taken])
        at = np.concatenate([each.at for each in self._taken])
        nbytes = np.concatenate([each.nbytes for each in self._taken])
        order = np.lexsort((at, files))
        files, at, ends = files[order], at[order], (at + nbytes)[order]
        shared = (files[1:] == files[:-1]) & (at[1:] < ends[:-1])
        if shared.any():
            number = int(shared.argmax()) + 1
            name = list(self._numbers)[files[number]]
            raise MalformedError(f"byte {at[number]} of '{name}' is in two boxes")


def _column(value: Json, what: str) -> Numbers:
    """``value``, which must be a list of numbers from 0 to 2**62."""
    given = a_list(value, what)
    if not set(map(type, given)) <= {int} or (given and not 0 <= min(given) <= max(given) < MOST):
        raise MalformedError(f"{what} has a list of something else than numbers of anything")
    return np.array(given, np.int64)


def _file(name: str, entry: Json, names: re.Pattern[str]) -> StoredFile:
    if names.fullmatch(name) is None:
        raise MalformedError(f"it names a file {name!r}, which no rank writes")
    entry = an_object(entry, name)
    size = a_count(entry["size"], name)
    blocks = tuple(a_text(each, name) for each in a_list(entry[DIGEST], name))
    if len(blocks) != -(-size // BLOCK) or not all(is_digest(each) for each in blocks):
        raise MalformedError(f"'{name}' of {size} bytes has {len(blocks)} digests")
    return StoredFile(size, blocks)


def _optimizer(entry: Json, read: _Tensors, sizes: Mapping[str, int], stored: dict[Path, StoredTensor | Json]) -> Json:
    """Put the optimizer into ``stored``; returns its class. ``sizes``: the elements of each parameter."""
    entry = an_object(entry, "optimizer")
    for name, states in an_object(entry["state"], "state").items():
        for key, value in an_object(states, name).items():
            tensor = tensor_entry(value)
            if tensor is None:
                # State that is no tensor has none in it: no rank but the first could write one.
                decode(value, no_tensor)
            found = value if tensor is None else read.tensor(tensor, f"{name}.{key}", sizes.get(name, 0))
            stored[OPTIMIZER, "state", name, key] = found
    left = set(entry["state"])
    for index, group in enumerate(a_list(entry["groups"], "groups")):
        members = a_list(an_object(an_object(group, "a group")["params"], "params")["$list"], "params")
        left -= {a_text(name, "params") for name in members}
        for setting, value in group.items():
            decode(value, read.stand_in)
            stored[*_GROUPS, index, setting] = read.within.get(id(tensor_entry(value)), value)
    if left:
        raise MalformedError(f"it has optimizer state of {listed(sorted(left))}, which no group has")
    return _kind(entry["kind"])


def _kind(entry: Json) -> Json:
    for each in entry if isinstance(entry, list) else [entry]:
        for name in ("module", "class"):
            a_text(an_object(each, "kind")[name], "kind")
    if entry == []:
        raise MalformedError("kind is empty")
    return entry


@dataclass(frozen=True, slots=True)
class Marker:
    """The facts of a checkpoint at its commit."""

    step: int
    world_size: int
    """Of the save."""
    complete: bool
    """Whether every rank's part is there; not so where one rank of a pretended world saved."""
    identity: str
    """No other save has it."""
    parent: str | None
    """Identity of the checkpoint of this folder that the model had saved or loaded last."""
    turn: int
    """Higher than that of every checkpoint that was in the folder at the commit."""
    files: Mapping[str, int]
    """Size in bytes of each file of the directory."""
    finite: bool
    """Whether all parameters were finite."""
    manifest: str
    """The sha256 of ``manifest.json``."""
    described: str | None = None
    """The sha256 of ``.metadata``; None where there is none, as of one rank of a pretended world."""
    format: int = FORMAT

    def rendered(self) -> bytes:
        return _render({**dataclasses.asdict(self), "torch": str(torch.__version__)})

    @classmethod
    def read(cls, directory: Place) -> Marker:
        """The marker of ``directory``.

        Raises:
            StateError: there is none, or it is of another format.
            CheckpointDamagedError: it is not what was written.
            OSError: it cannot be read.
        """
        storage = storage_of(directory)
        if not storage.exists(directory / MARKER):
            if not storage.exists(directory):
                raise StateError(
                    f"{directory} is no complete checkpoint: it does not exist on host {socket.gethostname()!r}. "
                    f"{REMEDY}"
                )
            raise StateError(
                f"{directory} is no complete checkpoint: it has no file '{MARKER}', so its save did not end or it is "
                f"another kind of directory. {REMEDY}"
            )
        return cls.found(directory)

    @classmethod
    def found(cls, directory: Place) -> Marker:
        """As ``read``, where it was seen to be there."""
        raw = storage_of(directory).read_whole(directory, MARKER, most=_MOST)
        with checked(directory, MARKER):
            content = an_object(parse(raw), "the marker")
            number = a_count(content["format"], "format")
            if number in _FILES:
                if raw != _render({name: each for name, each in content.items() if name != _DIGEST}):
                    raise MalformedError("its own sha256 differs")
                checked_fields: dict[str, Any] = {
                    **{name: a_count(content[name], name) for name in ("step", "world_size", "turn")},
                    **{name: a_text(content[name], name) for name in ("identity", "manifest")},
                    **{name: _a_bool(content[name], name) for name in ("complete", "finite")},
                    "parent": None if content["parent"] is None else a_text(content["parent"], "parent"),
                    "files": _sizes(content["files"]),
                    "described": a_text(content["described"], "described") if content.get("described") else None,
                    "format": number,
                }
                return cls(**checked_fields)
        raise StateError(
            f"{directory} has format {number}, but this polyshard reads {' and '.join(map(str, READ))}. Load it with "
            "the version that wrote it."
        )

    def require_files(self, directory: Place) -> None:
        """Raise CheckpointDamagedError where a file is gone, or has another size than at the commit."""
        storage_of(directory).require_files(directory, self.files)

    def require_described(self, directory: Place) -> None:
        """Raise CheckpointDamagedError where ``.metadata`` is not what was written.

        Nothing here reads it: whoever keeps the directory for others should hear of it all the same.
        """
        if self.described is None:
            return
        content = storage_of(directory).read_whole(directory, DESCRIBED, self.files.get(DESCRIBED))
        if hashlib.sha256(content).hexdigest() != self.described:
            raise damaged(directory, f"'{DESCRIBED}' is not what was committed: its sha256 is another")


def _render(content: Mapping[str, Any]) -> bytes:
    return render({**content, _DIGEST: hashlib.sha256(render(content)).hexdigest()})


def _a_bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise MalformedError(f"{name} is neither true nor false")
    return value


def _sizes(value: Any) -> dict[str, int]:
    sizes = {name: a_count(each, "a size") for name, each in an_object(value, "files").items()}
    for name in sizes:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise MalformedError(f"it names a file {name!r}, which is none of the directory")
    return sizes
