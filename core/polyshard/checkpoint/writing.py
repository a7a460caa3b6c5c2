"""The files of a checkpoint on their way to disk: which rank writes what, and how."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..errors import ConfigTypeError, PolyshardError
from ..interfaces import Collectives
from ..io.boxes import Box, Chunk, box_within, disjoint
from ..io.files import DIGEST, carried_out, digest_of
from ..io.memory import DTYPES, NAMES, HostCopy, pieces_of
from ..io.progress import report_progress
from ..state.exchange import coordinates, gather_to_first, scatter_from_first, speaks, together
from ..state.sharded import MODEL, OPTIMIZER, CheckpointTensor
from ..state.source import chunks_of
from .encoding import Encoder, Json, render, require_plain
from .manifest import ALIGNMENT, BLOCK, NAME, file_of
from .storage import OutputFile, Place, storage_of

#: Pieces up to here are put together, since a call to the system costs more than the copy.
_SMALL = 64 << 10
_WITHIN = "within"
#: A rank's report of the file that it wrote: plain JSON, which goes through files too.
Written = dict[str, Any]
#: ``("model", name)``, ``("optimizer", name, state)``, or ``("within", number)`` of a tensor in an encoded value.
Key = tuple[str, ...]
#: First indices and extents. Plain tuples: there are some for each tensor, and they travel.
Extent = tuple[tuple[int, ...], tuple[int, ...]]
#: Up to here a chunk is put to the front of its file, where one block has many that are read by themselves.
_IN_FRONT = 4096


@dataclass(frozen=True)
class Document:
    """What the manifest says beside tensors, of the rank that coordinates."""

    aliases: Mapping[str, str]
    """Further names in the model, and the first one."""
    kind: Any
    """The optimizer's class, or the classes; None where none is saved."""
    groups: Sequence[Mapping[str, Json]]
    """The optimizer's groups, each setting encoded."""
    precision: Json
    extra: Json
    tensors: Sequence[tuple[dict[str, Json], torch.Tensor]]
    """Those in encoded values, each with its description there."""

    @classmethod
    def of(
        cls,
        state: Mapping[str, Any],
        aliases: Mapping[str, str],
        kind: Any,
        precision: Mapping[str, Any],
        extra: Mapping[str, Any],
    ) -> Document:
        """Encode all but the tensors by name.

        Raises ConfigTypeError: there is something that cannot be written; names the way there.
        """
        encoder = Encoder()
        groups = [
            {name: encoder.encode(value, f"param_groups[{index}][{name!r}]") for name, value in group.items()}
            for index, group in enumerate(state.get(OPTIMIZER, {}).get("param_groups", ()))
        ]
        where = "the state of the precision caster of unit"
        states = {name: encoder.encode(value, f"{where} {name!r}") for name, value in precision.items()}
        return cls(aliases, kind, groups, states, encoder.encode(dict(extra), "extra"), encoder.tensors)


@dataclass(frozen=True)
class Writing:
    """What this rank is to write; the ranks have shared it out."""

    directory: Place
    file: str
    tensors: Sequence[torch.Tensor]
    """In the order of the file."""
    starts: Sequence[int]
    """The first byte of each."""
    size: int
    manifest: dict[str, Json] | None
    """But for the files; on the rank that coordinates."""
    copied: HostCopy | None = None

    def detached(self) -> Writing:
        """The same of copies in host memory, which take what this rank writes: later training is not in it."""
        return dataclasses.replace(self, tensors=(), copied=HostCopy(self.tensors, self.starts, self.size))

    def write(self) -> Written:
        """Write it, to be on disk when this returns; returns what ``finish`` takes. Exchanges nothing.

        Raises OSError: writing failed; names the file.
        """
        if not self.size:
            return {"file": self.file, "size": 0, "digests": []}
        pieces = self._pieces() if self.copied is None else self.copied.pieces()
        with storage_of(self.directory).created(self.directory / self.file, self.size) as file:
            calls = (
                partial(_write_block, file, block, index * BLOCK)
                for index, block in enumerate(_blocks(_joined(pieces)))
            )
            found: list[str] = []
            for digest, block in carried_out(calls, -(-self.size // BLOCK)):
                file.follow(block, len(found) * BLOCK)
                found.append(digest)
                report_progress(min(len(found) * BLOCK, self.size), self.size)
        return {"file": self.file, "size": self.size, "digests": found}

    def finish(self, everything: Sequence[Written]) -> tuple[dict[str, int], str]:
        """Write the manifest of what ranks' ``write`` returned; returns sizes of files in bytes, and its sha256."""
        assert self.manifest is not None
        files = {each["file"]: {"size": each["size"], DIGEST: each["digests"]} for each in everything if each["size"]}
        content = render({**self.manifest, "files": files})
        storage_of(self.directory).write_whole(self.directory / NAME, content)
        sizes = {NAME: len(content), **{name: int(each["size"]) for name, each in files.items()}}
        return sizes, hashlib.sha256(content).hexdigest()

    def _pieces(self) -> Iterator[memoryview]:
        end = 0
        for tensor, start in zip(self.tensors, self.starts, strict=True):
            if start > end:
                yield memoryview(bytes(start - end))
            yield from pieces_of(tensor)
            end = start + tensor.numel() * tensor.element_size()


def plan_writing(
    directory: Place, state: Mapping[str, Any], document: Document | None, collectives: Collectives
) -> Writing:
    """Share out ``state`` to be written into ``directory``: what ranks hold alike is written by one of them.

    Where the collectives cannot communicate, this rank's part alone is. ``document``: on the rank that coordinates.
    """
    what = f"Sharing out {directory}"
    with together(collectives, what):
        offer, views = offered(state, () if document is None else document.tensors)
    offers = gather_to_first(collectives, offer)
    numbers = range(collectives.world_size) if speaks(collectives) else (collectives.rank,)
    shares = manifest = None
    with together(collectives, what):
        if offers is not None and document is not None:
            complete = len(offers) == collectives.world_size
            shares, stored = share_out(offers, [file_of(number) for number in numbers], complete=complete)
            manifest = _manifest(offers, stored, document)
    share = scatter_from_first(collectives, shares)
    tensors = [_part_of(views[key][index], part) for key, index, part in share]
    starts, size = places(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Writing(directory, file_of(collectives.rank), tensors, starts, size, manifest)


def write_all(writing: Writing, collectives: Collectives) -> tuple[dict[str, int], str]:
    """Write every rank's part, and the manifest; returns what ``Writing.finish`` does, on the rank that coordinates."""
    what = f"Writing {writing.directory}"
    with together(collectives, what):
        written = writing.write()
    everything = gather_to_first(collectives, written)
    finished: tuple[dict[str, int], str] = ({}, "")
    with together(collectives, what):
        if coordinates(collectives):
            assert everything is not None
            finished = writing.finish(everything)
    return finished


def offered(
    state: Mapping[str, Any], within: Iterable[tuple[Any, torch.Tensor]]
) -> tuple[Offer, dict[Key, list[Chunk]]]:
    """What this rank can write of ``state`` and of tensors ``within`` a document, and the memory of each chunk of it.

    Raises ConfigTypeError: there is a tensor, or a value, that no checkpoint holds; names it.
    """
    offer = Offer()
    views: dict[Key, list[Chunk]] = {}

    def take(key: Key, value: torch.Tensor, where: str) -> None:
        # What says of itself which chunks it has is no plain tensor, and need not be.
        if not hasattr(value, "__create_chunk_list__"):
            require_plain(value, where)
        elif value.dtype not in NAMES:
            raise ConfigTypeError(f"{where} is of {value.dtype}, which no checkpoint holds.")
        chunks = [chunk for chunk in chunks_of(value) if chunk.box.numel]
        if chunks or not value.numel():
            extents = tuple((chunk.box.offsets, chunk.box.sizes) for chunk in chunks)
            offer.tensors[key] = (NAMES[value.dtype], tuple(value.shape), extents)
            views[key] = chunks
            kept = value.kept if isinstance(value, CheckpointTensor) else None
            if kept is not None:
                # Whether it goes by itself is seen where all ranks' are.
                offer.kept[key] = (kept.label, kept.flat.numel(), kept.numel, kept.whole)
                views[_by_itself(key, kept.label)] = [Chunk(Box.whole(kept.flat.shape), kept.flat)]

    for name, value in state[MODEL].items():
        take((MODEL, name), value, f"model[{name!r}]")
    encoder = Encoder()
    for name, states in state.get(OPTIMIZER, {}).get("state", {}).items():
        is_part = any(isinstance(value, CheckpointTensor) and value.is_part for value in states.values())
        for key, value in states.items():
            where = f"optimizer.state[{name!r}][{key!r}]"
            if isinstance(value, torch.Tensor):
                take((OPTIMIZER, name, key), value, where)
                if is_part and value.numel() == 1 and not isinstance(value, CheckpointTensor):
                    offer.numbers[OPTIMIZER, name, key] = repr(value.item())
            else:
                offer.values[OPTIMIZER, name, key] = encoder.encode(value, where)
    for number, (_, tensor) in enumerate(within):
        take((_WITHIN, str(number)), tensor, "a tensor")
    return offer, views


def _manifest(offers: Sequence[Offer], stored: Mapping[Key, Json], document: Document) -> dict[str, Json]:
    model: dict[str, Json] = {}
    state: dict[str, dict[str, Json]] = {}
    for key, entry in stored.items():
        match key:
            case (first, name) if first == MODEL:
                model[name] = entry
            case (first, number) if first == _WITHIN:
                document.tensors[int(number)][0].update(entry)
            case (_, name, value):
                state.setdefault(name, {})[value] = {"$tensor": entry}
    for offer in offers:
        for (_, name, value), encoded in offer.values.items():
            state.setdefault(name, {}).setdefault(value, encoded)
    optimizer = None
    if document.kind is not None:
        optimizer = {"kind": document.kind, "groups": list(document.groups), "state": state}
    return {
        "format": 3,
        "model": model,
        "aliases": {name: first for name, first in document.aliases.items() if first in model},
        "optimizer": optimizer,
        "precision": document.precision,
        "extra": document.extra,
    }


def _joined(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes, with small pieces put together."""
    small = bytearray()
    for piece in pieces:
        if len(piece) <= _SMALL:
            small += piece
            if len(small) < BLOCK:
                continue
            piece = memoryview(small)
        elif small:
            yield memoryview(small)
        small = bytearray()
        yield piece
    if small:
        yield memoryview(small)


def _blocks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Pieces of ``BLOCK`` bytes together; the last ones of the rest."""
    block: list[memoryview] = []
    room = BLOCK
    for piece in pieces:
        done = 0
        while done < len(piece):
            part = piece[done : done + room]
            block.append(part)
            done += len(part)
            room -= len(part)
            if not room:
                yield block
                block, room = [], BLOCK
    if block:
        yield block


def _write_block(file: OutputFile, block: Sequence[memoryview], at: int) -> tuple[str, Sequence[memoryview]]:
    digest = digest_of(block)
    file.write(block, at)
    return digest, block


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank holds."""

    tensors: dict[Key, tuple[str, tuple[int, ...], tuple[Extent, ...]]] = field(default_factory=dict)
    """Name of the dtype, shape of the whole tensor, and the boxes of it, each with elements."""
    values: dict[Key, Json] = field(default_factory=dict)
    """Optimizer state that is no tensor, encoded."""
    numbers: dict[Key, str] = field(default_factory=dict)
    """Of ``tensors``, those of one element that other ranks have of other parts of the parameter, in words."""
    kept: dict[Key, tuple[str, int, int, int]] = field(default_factory=dict)
    """Of ``tensors``, those that may be written piece by piece: the label of the piece, how many numbers there are of
    it, its elements, and the parameter's."""


#: One rank's chunks in the order of its file: keys, which of the boxes that it offered, and the part of that box to be
#: written; None for all of it.
Share = list[tuple[Key, int, Extent | None]]


def share_out(
    offers: Sequence[Offer], files: Sequence[str], *, complete: bool = False
) -> tuple[list[Share], dict[Key, Json]]:
    """Let each chunk be written by one rank, of those that hold it the one that has least to write so far.

    Where ranks cut their copies otherwise than others do, a chunk is the part of a box that no other chunk has.

    Returns each rank's share, and every tensor as the manifest has it. ``files``: the name of each rank's file;
    ``complete``: whether all ranks offer, so that nothing may be missing.

    Raises PolyshardError: ranks differ in what a tensor is, or lack parts of it.
    """
    offers = _piece_by_piece(offers) if complete else offers
    kinds: dict[Key, tuple[str, tuple[int, ...]]] = {}
    holders: dict[tuple[Key, Extent], list[tuple[int, int]]] = {}
    for rank, offer in enumerate(offers):
        for key, (dtype, shape, extents) in offer.tensors.items():
            if kinds.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise PolyshardError(
                    f"'{'.'.join(key)}' is {dtype} of shape {shape} on rank {rank} and {kinds[key][0]} of shape "
                    f"{kinds[key][1]} on another. Make the same model and optimizer on every rank."
                )
            for index, extent in enumerate(extents):
                holders.setdefault((key, extent), []).append((rank, index))
    chosen = _apart(kinds, holders, complete=complete)
    _require_alike(offers)
    shares: list[list[tuple[int, Key, int, Extent | None, Extent]]] = [[] for _ in offers]
    loads = [0] * len(offers)
    shared = []
    for key, extent, part, candidates in chosen:
        nbytes = math.prod((part or extent)[1]) * DTYPES[kinds[key][0]].itemsize
        if len(candidates) > 1:
            shared.append((nbytes, key, extent, part, candidates))
            continue
        ((rank, index),) = candidates
        shares[rank].append((nbytes, key, index, part, part or extent))
        loads[rank] += nbytes
    # The largest first: smaller ones even out the rest.
    for nbytes, key, extent, part, candidates in sorted(shared, key=lambda each: -each[0]):
        rank, index = min(candidates, key=lambda each: loads[each[0]])
        shares[rank].append((nbytes, key, index, part, part or extent))
        loads[rank] += nbytes
    chunks: dict[Key, list[Json]] = {key: [] for key in kinds}
    found: list[Share] = []
    for file, share in zip(files, shares, strict=True):
        share.sort(key=lambda each: each[0] > _IN_FRONT)
        starts, _ = places(each[0] for each in share)
        for at, (nbytes, key, _, _, (offsets, sizes)) in zip(starts, share, strict=True):
            chunks[key].append([list(offsets), list(sizes), file, at, nbytes])
        found.append([(key, index, part) for _, key, index, part, _ in share])
    return found, {
        key: {"dtype": dtype, "shape": list(shape), "chunks": chunks[key]} for key, (dtype, shape) in kinds.items()
    }


def _piece_by_piece(offers: Sequence[Offer]) -> Sequence[Offer]:
    """``offers`` with tensors by themselves of those pieces whose parameter has its state in several forms."""
    kept: dict[str, dict[str, tuple[int, int]]] = {}
    for offer in offers:
        for key, (label, _, numel, wanted) in offer.kept.items():
            kept.setdefault(key[1], {})[label] = (numel, wanted)
    # Otherwise some rank has no state at all.
    complete = {name for name, each in kept.items() if sum(n for n, _ in each.values()) >= max(each.values())[1]}
    parted: set[Key] = set()
    for key in {key for offer in offers for key in offer.kept if key[1] in complete}:
        found = [offer.tensors[key] for offer in offers if key in offer.tensors]
        kinds = {(dtype, shape) for dtype, shape, _ in found}
        boxes = {Box(*extent) for *_, extents in found for extent in extents}
        held, wanted = sum(box.numel for box in boxes), math.prod(found[0][1])
        if held > wanted:
            held = sum(part.numel for _, part in disjoint(list(boxes)))
        if len(kinds) > 1 or held < wanted:
            parted.add(key)
    if not parted:
        return offers
    changed = []
    for offer in offers:
        tensors = {key: value for key, value in offer.tensors.items() if key not in parted}
        for key, (label, numbers, *_) in offer.kept.items():
            if key in parted:
                tensors[_by_itself(key, label)] = offer.tensors[key][0], (numbers,), (((0,), (numbers,)),)
        changed.append(Offer(tensors, offer.values, offer.numbers))
    return changed


def _by_itself(key: Key, label: str) -> Key:
    return (*key[:-1], f"{key[-1]}{label}")


def places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The first byte of each chunk in its file, and the file's size. ``sizes``: of the chunks, in bytes."""
    starts, end = [], 0
    for nbytes in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + nbytes
    return starts, end


#: Ranks, and which of the boxes that they offered.
_Candidates = list[tuple[int, int]]


def _apart(
    kinds: Mapping[Key, tuple[str, tuple[int, ...]]],
    holders: Mapping[tuple[Key, Extent], _Candidates],
    *,
    complete: bool,
) -> Iterator[tuple[Key, Extent, Extent | None, _Candidates]]:
    """Boxes that have each element once: with the part of the box, where it is not all of it, and who holds it.

    Raises PolyshardError: together they are no whole tensor, though they are to be.
    """
    held: dict[Key, list[tuple[Extent, _Candidates]]] = {key: [] for key in kinds}
    for (key, extent), candidates in holders.items():
        held[key].append((extent, candidates))
    for key, boxes in held.items():
        numel, wanted = sum(math.prod(sizes) for (_, sizes), _ in boxes), math.prod(kinds[key][1])
        parts: list[tuple[int, Extent | None]] = [(number, None) for number in range(len(boxes))]
        if numel > wanted:
            cut = [
                (number, (box.offsets, box.sizes)) for number, box in disjoint([Box(*extent) for extent, _ in boxes])
            ]
            parts = [(number, None if part == boxes[number][0] else part) for number, part in cut]
            numel = sum(math.prod(sizes) for _, (_, sizes) in cut)
        if numel < wanted and complete:
            raise PolyshardError(
                f"Ranks hold {numel} of the {wanted} elements of '{'.'.join(key)}': some have no such state of their "
                "part of the parameter. Let every rank step its part, by a gradient of zeros where it has no other."
            )
        for number, part in parts:
            yield key, boxes[number][0], part, boxes[number][1]


def _require_alike(offers: Sequence[Offer]) -> None:
    """Raise PolyshardError where ranks with different parts of a parameter have another number each for its state."""
    known: dict[Key, tuple[int, str]] = {}
    for rank, offer in enumerate(offers):
        for key, number in offer.numbers.items():
            first, other = known.setdefault(key, (rank, number))
            if number != other:
                raise PolyshardError(
                    f"'{'.'.join(key)}' is {other} on rank {first} and {number} on rank {rank}, which hold different "
                    "parts of the parameter: a checkpoint has one for all of it. Let every rank step its part as "
                    "often, by a gradient of zeros where it has no other."
                )


def _part_of(chunk: Chunk, part: Extent | None) -> torch.Tensor:
    return chunk.view if part is None else box_within(chunk.view, chunk.box, Box(*part))
