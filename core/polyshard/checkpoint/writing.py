"""The files of a checkpoint on their way to disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigTypeError
from ..interfaces import Collectives
from ..state.agreement import together
from ..state.exchange import coordinates, gather_to_first, scatter_from_first, speaks
from ..state.held import chunks_of
from ..state.places import MODEL, OPTIMIZER
from . import digests, disk
from .digests import digest_of
from .documents import render
from .dtypes import NAMES
from .encoding import Encoder, Json, require_plain
from .manifest import BLOCK, NAME, file_of
from .memory import HostCopy, pieces_of
from .sharing import Key, Offer, places, share_out
from .threads import carried_out

#: Pieces up to here are put together, since a call to the system costs more than the copy.
_SMALL = 64 << 10
_WITHIN = "within"
#: Blocks that go to disk together while others are hashed.
_FLUSHED = 8
#: What a rank tells of the file that it wrote: plain JSON, which goes through files too.
Written = dict[str, Any]


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
        """Encode what is not tensors by name.

        Raises:
            ConfigTypeError: there is something that cannot be written; names the way there.
        """
        encoder = Encoder()
        groups = [
            {name: encoder.encode(value, f"param_groups[{index}][{name!r}]") for name, value in group.items()}
            for index, group in enumerate(state.get(OPTIMIZER, {}).get("param_groups", ()))
        ]
        where = "the state of the precision caster of unit"
        told = {name: encoder.encode(value, f"{where} {name!r}") for name, value in precision.items()}
        return cls(aliases, kind, groups, told, encoder.encode(dict(extra), "extra"), encoder.tensors)


@dataclass(frozen=True)
class Writing:
    """What this rank is to write; the ranks have shared it out."""

    directory: Path
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
        """The same of copies in host memory: what is trained on meanwhile is not in it.

        Takes the memory of what this rank writes, which of replicated state is a part.
        """
        return dataclasses.replace(self, tensors=(), copied=HostCopy(self.tensors, self.starts, self.size))

    def write(self) -> Written:
        """Write it, to be on disk when this returns; returns what ``finish`` is to be told. Exchanges nothing.

        Raises:
            OSError: writing failed; names the file.
        """
        if not self.size:
            return {"file": self.file, "size": 0, "digests": []}
        path = self.directory / self.file
        pieces = self._pieces() if self.copied is None else self.copied.pieces()
        with disk.created(path) as descriptor:
            calls = (
                partial(_write_block, descriptor, block, index * BLOCK, path)
                for index, block in enumerate(_blocks(_joined(pieces)))
            )
            found: list[str] = []
            for digest in carried_out(calls, -(-self.size // BLOCK)):
                found.append(digest)
                if len(found) % _FLUSHED == 0:
                    disk.begin_flush(descriptor, (len(found) - _FLUSHED) * BLOCK, _FLUSHED * BLOCK)
        return {"file": self.file, "size": self.size, "digests": found}

    def finish(self, everything: Sequence[Written]) -> tuple[dict[str, int], str]:
        """Write the manifest, on the rank that coordinates.

        Args:
            everything: What each rank's ``write`` returned.

        Returns:
            Each file's size in bytes, and the sha256 of the manifest.
        """
        assert self.manifest is not None
        files = {
            each["file"]: {"size": each["size"], digests.NAME: each["digests"]} for each in everything if each["size"]
        }
        content = render({**self.manifest, "files": files})
        disk.write_whole(self.directory / NAME, content)
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
    directory: Path, state: Mapping[str, Any], document: Document | None, collectives: Collectives
) -> Writing:
    """Share out ``state`` to be written into ``directory``: what ranks hold alike is written by one of them.

    Where the collectives cannot communicate, this rank's part alone is.

    Args:
        directory: Of this save alone.
        state: Of this rank.
        document: On the rank that coordinates.
        collectives: Of the model.
    """
    what = f"Sharing out {directory}"
    with together(collectives, what):
        offer, views = offered(state, () if document is None else document.tensors)
    offers = gather_to_first(collectives, offer)
    numbers = range(collectives.world_size) if speaks(collectives) else (collectives.rank,)
    shares = manifest = None
    with together(collectives, what):
        if offers is not None and document is not None:
            shares, stored = share_out(offers, [file_of(number) for number in numbers])
            manifest = _manifest(offers, stored, document)
    share = scatter_from_first(collectives, shares)
    tensors = [views[key][index] for key, index in share.chunks]
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
) -> tuple[Offer, dict[Key, list[torch.Tensor]]]:
    """What this rank can write of ``state`` and of tensors ``within`` a document, and the memory of each chunk of it.

    Raises:
        ConfigTypeError: there is a tensor, or a value, that no checkpoint holds; names it.
    """
    offer = Offer()
    views: dict[Key, list[torch.Tensor]] = {}

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
            views[key] = [chunk.view for chunk in chunks]

    for name, value in state[MODEL].items():
        take((MODEL, name), value, f"model[{name!r}]")
    encoder = Encoder()
    for name, states in state.get(OPTIMIZER, {}).get("state", {}).items():
        for key, value in states.items():
            where = f"optimizer.state[{name!r}][{key!r}]"
            if isinstance(value, torch.Tensor):
                take((OPTIMIZER, name, key), value, where)
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
        for (_, name, value), told in offer.values.items():
            state.setdefault(name, {}).setdefault(value, told)
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
    """Pieces of ``BLOCK`` bytes together; the last ones of what is left."""
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


def _write_block(descriptor: int, block: Sequence[memoryview], at: int, path: Path) -> str:
    digest = digest_of(block)
    disk.write_at(descriptor, block, at, path)
    return digest
