"""``manifest.json`` and ``COMMITTED``: what the files of a checkpoint hold, and whether that can be."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from ..errors import StateError
from ..io.boxes import Box, BoxIndex, span
from ..io.files import DIGEST, REMEDY, damaged, is_digest
from ..io.memory import DTYPES
from ..state.source import listed
from .encoding import (
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
    parse,
    render,
    tensor_entry,
)
from .storage import MARKER, Place, storage_of

NAME = "manifest.json"
#: Bytes of a file that have a digest of their own, and are read together.
BLOCK = 4 << 20
#: Of what begins in a file.
ALIGNMENT = 64
_FILE = re.compile(r"rank-\d{5,9}\.bin", re.ASCII)
#: Of markers and manifests; a checkpoint of another number is refused.
FORMAT = 3
_DIGEST = "sha256"
#: Bytes: a hundred for each rank's file, and there are not more ranks than half a million.
_MOST = 64 << 20


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, in row-major order."""

    box: Box
    file: str
    at: int
    """First byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @cached_property
    def index(self) -> BoxIndex:
        """Finds those of ``chunks`` that a box needs: there may be one for each rank of the save."""
        return BoxIndex(chunk.box for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file with elements."""

    size: int
    """In bytes."""
    blocks: tuple[str, ...]
    """The digest of every ``BLOCK`` bytes, the last one's of the rest."""


@dataclass(frozen=True)
class StoredOptimizer:
    """One optimizer or several, as one."""

    state: Mapping[str, Mapping[str, StoredTensor | Json]]
    """By parameter and name of the state; other values are encoded."""
    groups: Sequence[Mapping[str, Json]]
    """Encoded settings."""
    kind: Any
    """The class, or the classes."""


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint holds."""

    files: Mapping[str, StoredFile]
    model: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]
    """Further names of what ``model`` has, and the name there."""
    optimizer: StoredOptimizer | None
    precision: Json
    extra: Json
    complete: bool
    directory: Place
    _within: dict[int, StoredTensor] = field(default_factory=dict)
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
            if top["format"] != 3:
                raise MalformedError(f"it is of format {top['format']!r}, and 'COMMITTED' of format 3")
            known = {name: _file(name, each) for name, each in an_object(top["files"], "files").items()}
            nbytes = {name: each.size for name, each in known.items()}
            if {NAME: len(content), **nbytes} != marker.files:
                raise MalformedError("its files are not those of 'COMMITTED'")
            read = _Tensors(known, complete=marker.complete)
            model = {name: read.tensor(each, name) for name, each in an_object(top["model"], "model").items()}
            aliases = an_object(top["aliases"], "aliases")
            for name, first in aliases.items():
                if name in model or first not in model:
                    raise MalformedError(f"'{name}' is said to be '{first}'")
            sizes = {name: math.prod(each.shape) for name, each in model.items()}
            sizes.update({name: sizes[first] for name, first in aliases.items()})
            optimizer = None if top["optimizer"] is None else _optimizer(top["optimizer"], read, sizes)
            found = cls(known, model, aliases, optimizer, top["precision"], top["extra"], marker.complete, directory)

            # Decoded without elements first: a rank must not find out when others have changed their models.
            def stand_in(entry: Json) -> torch.Tensor:
                return read.stand_in(entry, found._within)

            for each in found.settings():
                decode(each, stand_in)
            an_object(decode(found.extra, stand_in), "extra")
            for state in an_object(decode(found.precision, stand_in), "precision").values():
                an_object(state, "precision")
            read.require_apart()
        return found

    def within(self, entry: Json) -> StoredTensor:
        """The tensor of ``entry`` in an encoded value of this manifest."""
        return self._within[id(entry)]

    @property
    def in_values(self) -> Iterable[StoredTensor]:
        """Tensors in encoded values."""
        return self._within.values()

    def settings(self) -> Iterator[Json]:
        for group in () if self.optimizer is None else self.optimizer.groups:
            yield from group.values()

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        for name, stored in self.model.items():
            yield f"model.{name}", stored
        if self.optimizer is not None:
            for name, states in self.optimizer.state.items():
                for state, value in states.items():
                    if isinstance(value, StoredTensor):
                        yield f"optimizer.state.{name}.{state}", value
        for stored in self.in_values:
            yield "a tensor in extra, precision or param_groups", stored

    @cached_property
    def _in_order(self) -> Mapping[str, list[tuple[int, int, str]]]:
        """The chunks of each file as they lie there: their first byte, the one behind them, and what they are of."""
        found: dict[str, list[tuple[int, int, str]]] = {}
        for name, stored in self.tensors():
            for chunk in stored.chunks:
                found.setdefault(chunk.file, []).append((chunk.at, chunk.at + chunk.nbytes, name))
        return {file: sorted(chunks) for file, chunks in found.items()}

    def block_damaged(self, file: str, index: int) -> Exception:
        """The error for a block whose content is not what was written."""
        low = index * BLOCK
        high = min(low + BLOCK, self.files[file].size)
        order = self._in_order.get(file, [])
        first = bisect.bisect_right(order, low, key=lambda each: each[1])
        hit = {name: None for *_, name in order[first : bisect.bisect_left(order, high, key=lambda each: each[0])]}
        what = f", where {listed(list(hit))} lie" if hit else ""
        return damaged(
            self.directory,
            f"'{file}' holds something else than was written from byte {low:,} to {high:,}{what}: the digest differs",
        )


class _Tensors:
    """Takes descriptions of tensors, and sees that they fit the files."""

    def __init__(self, files: Mapping[str, StoredFile], *, complete: bool) -> None:
        self._files = files
        self._complete = complete
        self._chunks: list[StoredChunk] = []

    def stand_in(self, entry: Json, found: dict[int, StoredTensor]) -> torch.Tensor:
        """Without elements, for a tensor in an encoded value, which must be whole; it is noted in ``found``."""
        stored = self.tensor(entry, "a tensor in a value", 0)
        found[id(entry)] = stored
        return torch.empty(0, dtype=stored.dtype)

    def tensor(self, entry: Json, name: str, most: int | None = None) -> StoredTensor:
        """One of the manifest's. ``most``: how many elements it has at most, where they are not all in the files.

        Raises MalformedError: its chunks are not what its shape says, or not in the files.
        """
        what = f"'{name}'"
        entry = an_object(entry, what)
        dtype, shape = DTYPES[a_text(entry["dtype"], what)], a_shape(entry["shape"], what)
        whole = Box.whole(shape)
        chunks = tuple(self._chunk(each, what, dtype, whole) for each in a_list(entry["chunks"], what))
        held = sum(chunk.box.numel for chunk in chunks)
        missing = whole.numel - held
        if missing < 0 or (missing and (self._complete or (most is not None and whole.numel > most))):
            raise MalformedError(f"{what} of shape {shape} has {held} elements")
        if len(chunks) > 1 and _overlapping([chunk.box for chunk in chunks], shape):
            raise MalformedError(f"{what} has elements twice")
        self._chunks += chunks
        return StoredTensor(dtype, shape, chunks)

    def _chunk(self, entry: Json, what: str, dtype: torch.dtype, whole: Box) -> StoredChunk:
        offsets, sizes, file, at, nbytes = a_list(entry, what)
        box = Box(counts(offsets, what), counts(sizes, what))
        inside = len(box.offsets) == len(box.sizes) == len(whole.sizes) and all(
            start + size <= extent for start, size, extent in zip(box.offsets, box.sizes, whole.sizes, strict=True)
        )
        if not inside:
            raise MalformedError(f"{what} of shape {whole.sizes} has a chunk at {box.offsets} of {box.sizes}")
        at, nbytes = a_count(at, what), a_count(nbytes, what)
        if box.numel == 0 or box.numel * dtype.itemsize != nbytes:
            raise MalformedError(f"{what} has a chunk of {nbytes} bytes for {box.numel} elements of {dtype}")
        if file not in self._files or at % ALIGNMENT or at + nbytes > self._files[file].size:
            raise MalformedError(f"{what} is said to lie at byte {at} of {file!r}")
        return StoredChunk(box, file, at, nbytes)

    def require_apart(self) -> None:
        """Raise MalformedError where two chunks share bytes: a small file would become any amount of memory."""
        order = sorted(self._chunks, key=lambda chunk: (chunk.file, chunk.at))
        for one, other in pairwise(order):
            if one.file == other.file and one.at + one.nbytes > other.at:
                raise MalformedError(f"byte {other.at} of '{one.file}' is in two chunks")


def _file(name: str, entry: Json) -> StoredFile:
    if _FILE.fullmatch(name) is None:
        raise MalformedError(f"it names a file {name!r}, which no rank writes")
    entry = an_object(entry, name)
    size = a_count(entry["size"], name)
    blocks = tuple(a_text(each, name) for each in a_list(entry[DIGEST], name))
    if len(blocks) != -(-size // BLOCK) or not all(is_digest(each) for each in blocks):
        raise MalformedError(f"'{name}' of {size} bytes has {len(blocks)} digests")
    return StoredFile(size, blocks)


def _optimizer(entry: Json, read: _Tensors, sizes: Mapping[str, int]) -> StoredOptimizer:
    """``sizes``: the elements of each parameter."""
    entry = an_object(entry, "optimizer")
    state: dict[str, dict[str, StoredTensor | Json]] = {}
    for name, states in an_object(entry["state"], "state").items():
        own = state.setdefault(name, {})
        for key, value in an_object(states, name).items():
            tensor = tensor_entry(value)
            if tensor is None:
                # State that is no tensor has none in it: no rank but the first could write one.
                decode(value, _no_tensor)
            own[key] = value if tensor is None else read.tensor(tensor, f"{name}.{key}", sizes.get(name, 0))
    groups = [an_object(each, "a group") for each in a_list(entry["groups"], "groups")]
    members = [a_list(an_object(group["params"], "params")["$list"], "params") for group in groups]
    others = state.keys() - {a_text(name, "params") for names in members for name in names}
    if others:
        raise MalformedError(f"it has optimizer state of {listed(sorted(others))}, which no group has")
    return StoredOptimizer(state, groups, _kind(entry["kind"]))


def _kind(entry: Json) -> Any:
    for each in entry if isinstance(entry, list) else [entry]:
        for name in ("module", "class"):
            a_text(an_object(each, "kind")[name], "kind")
    if entry == []:
        raise MalformedError("kind is empty")
    return entry


def _no_tensor(entry: Json) -> torch.Tensor:
    raise MalformedError("it has a tensor where none can be")


def _overlapping(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    ranges = [span(shape, box) for box in boxes]
    if all(stop - start == box.numel for (start, stop), box in zip(ranges, boxes, strict=True)):
        return any(stop > start for (_, stop), (start, _) in pairwise(sorted(ranges)))
    # Halved by planes between their first elements, and boxes that a plane meets with them.
    groups = [list(boxes)]
    while groups:
        group = groups.pop()
        starts = [sorted(set(column)) for column in zip(*(box.offsets for box in group), strict=True)]
        dim = max(range(len(shape)), key=lambda dim: len(starts[dim]))
        if len(starts[dim]) == 1:
            # All begin with one element.
            return True
        plane = starts[dim][len(starts[dim]) // 2]
        below, above = [], []
        for box in group:
            room, size = plane - box.offsets[dim], box.sizes[dim]
            if room > 0:
                below.append(box.narrowed(dim, 0, min(room, size)))
            if size > room:
                above.append(box.narrowed(dim, max(room, 0), size - max(room, 0)))
        groups += [half for half in (below, above) if len(half) > 1]
    return False


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
            if number == FORMAT:
                if raw != _render({name: each for name, each in content.items() if name != _DIGEST}):
                    raise MalformedError("its own sha256 differs")
                checked_fields: dict[str, Any] = {
                    **{name: a_count(content[name], name) for name in ("step", "world_size", "turn")},
                    **{name: a_text(content[name], name) for name in ("identity", "manifest")},
                    **{name: _a_bool(content[name], name) for name in ("complete", "finite")},
                    "parent": None if content["parent"] is None else a_text(content["parent"], "parent"),
                    "files": _sizes(content["files"]),
                }
                return cls(**checked_fields)
        raise StateError(
            f"{directory} has format {number}, but this polyshard reads format {FORMAT}. Load it with the version that "
            "wrote it."
        )

    def require_files(self, directory: Place) -> None:
        """Raise CheckpointDamagedError where a file is gone, or has another size than at the commit."""
        storage_of(directory).require_files(directory, self.files)


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
