"""The files of a checkpoint on their way to disk: what each rank writes, and what the first one writes beside."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ..errors import ConfigTypeError
from ..interfaces import Collectives
from ..io.boxes import Box, Chunk, Numbers
from ..io.files import DIGEST, carried_out, digest_of
from ..io.memory import NAMES, HostCopy, pieces_of
from ..io.progress import report_progress
from ..state.exchange import Answers, gather_to_first, scatter_from_first, speaks, together
from ..state.sharded import MODEL, OPTIMIZER, CheckpointTensor
from ..state.source import chunks_of, in_chunks
from . import metadata
from .archive import ALIGNMENT, around, of_value
from .encoding import Encoder, Json, decode, no_tensor, render, require_plain
from .manifest import BLOCK, DESCRIBED, FORMAT, NAME, Path, StoredTensor, file_of
from .shares import Key, Kind, Offer, Shares, piece_of, require_alike, share_out
from .storage import OutputFile, Place, storage_of

#: Pieces up to here are put together, since a call to the system costs more than the copy.
_SMALL = 64 << 10
#: A rank's report of the file that it wrote: plain JSON, which goes through files too.
Written = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """What a checkpoint has beside tensors by name, of the rank that coordinates."""

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
    values: Mapping[Path, Any]
    """Settings and ``extra`` as they are, for stock torch."""

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
        given = state.get(OPTIMIZER, {}).get("param_groups", ())
        groups = [
            {name: encoder.encode(value, f"param_groups[{index}][{name!r}]") for name, value in group.items()}
            for index, group in enumerate(given)
        ]
        where = "the state of the precision plugin of unit"
        states = {name: encoder.encode(value, f"{where} {name!r}") for name, value in precision.items()}
        encoded = encoder.encode(dict(extra), "extra")
        values: dict[Path, Any] = {
            (OPTIMIZER, "param_groups", index, name): value
            for index, group in enumerate(given)
            for name, value in group.items()
        }
        values.update(_flattened(extra, ("extra",)))
        return cls(aliases, kind, groups, states, encoded, encoder.tensors, values)


def _flattened(values: Mapping[Any, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value and all(isinstance(each, str) for each in value):
            yield from _flattened(value, (*path, name))
        elif isinstance(name, str):
            yield (*path, name), value


@dataclass(frozen=True)
class Plan:
    """Who writes what, as all ranks agreed: again for the next save, where every rank offers the same."""

    offered: str
    """The digest of what this rank offers."""
    share: Numbers
    """The rows of its offer that this rank writes, in the order of its file."""
    shares: Shares | None
    """On the rank that coordinates."""


class FileLayout:
    """One rank's file: elements with what archives have around them, and where each begins."""

    def __init__(self) -> None:
        self.size = 0
        self._tensors: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._copy: HostCopy | None = None

    def add_tensor(self, tensor: torch.Tensor) -> int:
        """Add an archive of ``tensor``; returns where its elements begin."""
        head, tail = around(tensor.dtype, tuple(tensor.shape))
        start = self.add(_bytes(head)) + len(head)
        self._put(tensor.detach(), start)
        self._put(_bytes(tail), self.size)
        return start

    def add(self, tensor: torch.Tensor) -> int:
        """Add elements; returns where they begin."""
        start = -(-self.size // ALIGNMENT) * ALIGNMENT
        self._put(tensor.detach(), start)
        return start

    def copy(self) -> None:
        """Have copies in host memory, of what is added no more: later training is not in them."""
        self._copy = HostCopy(self._tensors, self._starts, self.size)
        self._tensors, self._starts = [], []

    def release(self) -> None:
        """Let go of tensors and copies, once they are written."""
        self._copy, self._tensors, self._starts = None, [], []

    def pieces(self) -> Iterator[memoryview]:
        if self._copy is not None:
            yield from self._copy.pieces()
        end = 0
        for tensor, start in zip(self._tensors, self._starts, strict=True):
            if start > end:
                yield memoryview(bytes(start - end))
            yield from pieces_of(tensor)
            end = start + tensor.numel() * tensor.element_size()

    def _put(self, tensor: torch.Tensor, start: int) -> None:
        self._tensors.append(tensor)
        self._starts.append(start)
        self.size = start + tensor.numel() * tensor.element_size()


@functools.lru_cache(maxsize=1 << 14)
def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@dataclass(frozen=True)
class Writing:
    """What this rank is to write; the ranks have shared it out."""

    directory: Place
    file: str
    layout: FileLayout
    ending: Ending | None
    """On the rank that coordinates."""
    plan: Plan

    def write(self) -> Written:
        """Write it, to be on disk when this returns; returns what ``Ending.write`` takes. Exchanges nothing.

        Raises OSError: writing failed; names the file.
        """
        size = self.layout.size
        found: list[str] = []
        if size:
            with storage_of(self.directory).created(self.directory / self.file, size) as file:
                blocks = enumerate(_blocks(self.layout.pieces()))
                calls = (partial(_write_block, file, block, index * BLOCK) for index, block in blocks)
                # Ended before the file is closed.
                with closing(carried_out(calls, -(-size // BLOCK))) as written:
                    for digest, block in written:
                        file.follow(block, len(found) * BLOCK)
                        found.append(digest)
                        report_progress(min(len(found) * BLOCK, size), size)
        return {"file": self.file, "size": size, "digests": found}


def _blocks(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """``pieces`` in blocks of ``BLOCK`` bytes, the last one of the rest; small ones are put together."""
    block: list[memoryview | bytearray] = []
    room = BLOCK
    for piece in pieces:
        while piece:
            part, piece = piece[:room], piece[room:]
            room -= len(part)
            if len(part) > _SMALL:
                block.append(part)
            elif block and isinstance(block[-1], bytearray):
                block[-1] += part
            else:
                block.append(bytearray(part))
            if not room:
                yield [memoryview(each) for each in block]
                block, room = [], BLOCK
    if block:
        yield [memoryview(each) for each in block]


def _write_block(file: OutputFile, block: Sequence[memoryview], at: int) -> tuple[str, Sequence[memoryview]]:
    digest = digest_of(block)
    file.write(block, at)
    return digest, block


@dataclass(frozen=True)
class Ending:
    """What the rank that coordinates writes when all have written."""

    directory: Place
    files: Sequence[str]
    """The names of files with elements, by number."""
    manifest: Mapping[str, Any]
    """But for the files."""
    tensors: Mapping[Path, StoredTensor]
    values: Mapping[Path, metadata.Bytes]
    complete: bool

    def write(self, everything: Sequence[Written]) -> dict[str, Any]:
        """Write ``manifest.json``, and ``.metadata``, of what ranks' ``write`` returned; returns what a marker says of
        them: sizes of all files, and the sha256 of both.

        Raises PolyshardError: not all bytes of all ranks are there; OSError: writing failed.
        """
        storage = storage_of(self.directory)
        sizes = {each["file"]: int(each["size"]) for each in everything if each["size"]}
        storage.require_written(self.directory, sizes)
        digests = []
        # ``.metadata`` last: to stock torch it says that everything is there.
        for name, content in zip((NAME, DESCRIBED), self.composed(everything), strict=True):
            if content is not None:
                storage.write_whole(self.directory / name, content)
                sizes[name] = len(content)
            digests.append(content and hashlib.sha256(content).hexdigest())
        storage.require_written(self.directory, sizes)
        return {"files": sizes, "manifest": digests[0], "described": digests[1]}

    def composed(self, everything: Sequence[Written]) -> tuple[bytes, bytes | None]:
        """What both have to say. None: an incomplete state is nothing for stock torch."""
        found = {each["file"]: {"size": each["size"], DIGEST: each["digests"]} for each in everything}
        manifest = render({**self.manifest, "files": {name: found[name] for name in self.files}}, StoredTensor.entry)
        if not self.complete:
            return manifest, None
        return manifest, b"".join(metadata.rendered(self.tensors, self.values, self.files))


def plan_writing(
    directory: Place,
    state: Mapping[str, Any],
    document: Document | None,
    collectives: Collectives,
    before: Plan | None = None,
) -> Writing:
    """Share out ``state`` to be written into ``directory``: what ranks hold alike is written by one of them.

    Every rank calls it. ``document``: on the rank that coordinates. ``before``: the plan of the save before.

    Raises:
        PolyshardError: as ``share_out``; on the ranks that see it, and RankMismatchError on the others.
        ConfigTypeError: there is something that no checkpoint holds.
    """
    what = f"Laying out {directory}"
    with together(collectives, what):
        offer, chunks = offered(state)
    complete = collectives.world_size == 1 or speaks(collectives)
    plan, values = _agreed(offer, collectives, what, before, complete=complete)
    file, ending = FileLayout(), None
    with together(collectives, what):
        for row in plan.share.tolist():
            file.add_tensor(chunks[row].view)
        if document is not None:
            assert plan.shares is not None
            ending = ending_of(directory, plan.shares, document, values, file, collectives.rank, complete=complete)
    return Writing(directory, file_of(collectives.rank), file, ending, plan)


def _agreed(
    offer: Offer, collectives: Collectives, what: str, before: Plan | None, *, complete: bool
) -> tuple[Plan, dict[Key, Json]]:
    """Who writes what; and the optimizer state that is no tensor, on the rank that coordinates."""
    kinds = repr((offer.kinds, dict(offer.kept)))
    ranks = (collectives.world_size, collectives.rank)
    offered_here = hashlib.sha256(repr(ranks).encode() + kinds.encode() + offer.rows.tobytes()).hexdigest()
    is_known = before is not None and before.offered == offered_here
    answers = Answers(collectives, int(is_known), "", key=kinds)
    beside = gather_to_first(collectives, (offer.values, offer.numbers)) or []
    values: dict[Key, Json] = {}
    for of_rank, _ in reversed(beside):
        values.update(of_rank)
    with together(collectives, what):
        require_alike([numbers for _, numbers in beside])
    if before is not None and all(answers.numbers):
        return before, values
    # One of all ranks with the same kinds says what these are.
    groups = answers.alike(range(len(answers.numbers)))
    says = any(group[0] == collectives.rank for group in groups) or not speaks(collectives)
    silent: dict[str, Any] = {} if says else {"kinds": (), "kept": {}}
    offers = gather_to_first(collectives, dataclasses.replace(offer, values={}, numbers={}, **silent))
    shares = None
    with together(collectives, what):
        if offers is not None:
            known = {rank: offers[group[0]] for group in groups for rank in group}
            offers = [
                dataclasses.replace(each, kinds=known[rank].kinds, kept=known[rank].kept)
                for rank, each in enumerate(offers)
            ]
            shares = share_out(offers, complete=complete)
    share: Numbers = scatter_from_first(collectives, None if shares is None else shares.of_ranks)
    return Plan(offered_here, share, shares), values


def offered(state: Mapping[str, Any]) -> tuple[Offer, list[Chunk]]:
    """What this rank can write of ``state``, and the memory of each row of it.

    Raises ConfigTypeError: there is a tensor, or a value, that no checkpoint holds; names it.
    """
    boxes: list[tuple[Kind, Sequence[Box]]] = []
    memory: list[Chunk] = []
    values: dict[Key, Json] = {}
    numbers: dict[Key, str] = {}
    kept: dict[Key, tuple[str, int, int]] = {}

    def take(key: Key, value: torch.Tensor, where: str) -> None:
        # What says of itself which chunks it has is no plain tensor, and need not be.
        if not in_chunks(value):
            require_plain(value, where)
        elif value.dtype not in NAMES:
            raise ConfigTypeError(f"{where} is of {value.dtype}, which no checkpoint holds.")
        chunks = [chunk for chunk in chunks_of(value) if chunk.box.numel]
        if not chunks and value.numel():
            return
        boxes.append(((key, NAMES[value.dtype], tuple(value.shape)), [chunk.box for chunk in chunks]))
        memory.extend(chunks)
        piece = value.kept if isinstance(value, CheckpointTensor) else None
        if piece is not None:
            # Whether it goes by itself is seen where all ranks' are.
            kept[key] = (piece.label, piece.numel, piece.whole)
            box = Box.whole(piece.flat.shape)
            boxes.append(((piece_of(key, piece.label), NAMES[value.dtype], box.sizes), [box]))
            memory.append(Chunk(box, piece.flat))

    for name, value in state[MODEL].items():
        take((MODEL, name), value, f"model[{name!r}]")
    encoder = Encoder()
    for name, states in state.get(OPTIMIZER, {}).get("state", {}).items():
        is_part = any(isinstance(value, CheckpointTensor) and value.is_part for value in states.values())
        for name_of_state, value in states.items():
            key = (OPTIMIZER, "state", name, name_of_state)
            where = f"optimizer.state[{name!r}][{name_of_state!r}]"
            if isinstance(value, torch.Tensor):
                take(key, value, where)
                if is_part and value.numel() == 1 and not isinstance(value, CheckpointTensor):
                    numbers[key] = repr(value.item())
            else:
                values[key] = encoder.encode(value, where)
    return Offer.of(boxes, values=values, numbers=numbers, kept=kept), memory


def ending_of(
    directory: Place,
    shares: Shares,
    document: Document,
    values: Mapping[Key, Json],
    file: FileLayout,
    rank: int,
    *,
    complete: bool,
) -> Ending:
    """What is written last. Adds to ``file`` what no other rank has."""
    paths = {id(value): path for path, value in document.values.items() if isinstance(value, torch.Tensor)}
    tensors: dict[Path, StoredTensor] = {}
    for entry, tensor in document.tensors:
        path = paths.pop(id(tensor), None)
        add = file.add if path is None else file.add_tensor
        at = np.array([add(tensor)] if tensor.numel() else [], np.int64)
        extents = np.array(tuple(tensor.shape) * len(at), np.int64).reshape(len(at), tensor.ndim)
        stored = StoredTensor(tensor.dtype, tuple(tensor.shape), extents * 0, extents, at * 0, at)
        entry.update(stored.entry())
        if path is not None:
            tensors[path] = stored
    # What is no tensor by name stands in the manifest; stock torch has it as an archive each.
    others: dict[Path, metadata.Bytes] = {}
    own = {path: value for path, value in document.values.items() if path not in tensors}
    own.update({key: decode(value, no_tensor) for key, value in values.items() if key not in shares.stored})
    for path, value in own.items() if complete else ():
        content = of_value(value)
        others[path] = (0, file.add(torch.frombuffer(bytearray(content), dtype=torch.uint8)), len(content))
    # Files are numbered in the order of ranks, without those that have none.
    has_file = np.array([*([file.size > 0] if shares.ends else []), *(end > 0 for end in shares.ends[1:])])
    numbers = np.cumsum(has_file) - 1
    named = {key: dataclasses.replace(each, files=numbers[each.files]) for key, each in shares.stored.items()}
    model = {key[1]: each for key, each in named.items() if key[0] == MODEL}
    aliases = {name: first for name, first in document.aliases.items() if first in model}
    state: dict[str, dict[str, Json]] = {}
    for key, each in named.items():
        if key[0] == OPTIMIZER:
            state.setdefault(key[2], {})[key[3]] = {"$tensor": each}
    for key, encoded in values.items():
        state.setdefault(key[2], {}).setdefault(key[3], encoded)
    manifest = {
        "format": FORMAT,
        "model": model,
        "aliases": aliases,
        "optimizer": document.kind and {"kind": document.kind, "groups": list(document.groups), "state": state},
        "precision": document.precision,
        "extra": document.extra,
    }
    tensors.update(named.items())
    tensors.update({(MODEL, name): model[first] for name, first in aliases.items()})
    # One rank of a pretended world stands alone, whatever its number.
    names = [file_of(number or rank) for number in np.flatnonzero(has_file).tolist()]
    return Ending(directory, names, manifest, tensors, others, complete)
