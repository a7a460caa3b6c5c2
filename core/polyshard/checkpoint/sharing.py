"""What each rank can write of a checkpoint, and which of them writes what several hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import PolyshardError
from .dtypes import DTYPES
from .encoding import Json
from .manifest import ALIGNMENT, chunk_described, described

#: ``("model", name)``, ``("optimizer", name, state)``, or ``("within", number)`` of a tensor in an encoded value.
Key = tuple[str, ...]
#: First indices and extents. Plain tuples: there are some for each tensor, and they travel.
Extent = tuple[tuple[int, ...], tuple[int, ...]]
#: Up to here a chunk is put to the front of its file, where one block has many that are read by themselves.
_SMALL = 4096


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank holds."""

    tensors: dict[Key, tuple[str, tuple[int, ...], tuple[Extent, ...]]] = field(default_factory=dict)
    """Name of the dtype, shape of the whole tensor, and the boxes of it, each with elements."""
    values: dict[Key, Json] = field(default_factory=dict)
    """Optimizer state that is no tensor, encoded."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes, in the order of its file: keys, and which of the boxes that it offered."""

    chunks: list[tuple[Key, int]]


def share_out(offers: Sequence[Offer], files: Sequence[str]) -> tuple[list[Share], dict[Key, Json]]:
    """Let each chunk be written by one rank, of those that hold it the one that has least to write so far.

    Args:
        offers: Of each rank.
        files: The name of each rank's file.

    Returns:
        Each rank's share, and every tensor as the manifest has it.

    Raises:
        PolyshardError: ranks differ in what a tensor is, or hold parts of it that overlap.
    """
    told: dict[Key, tuple[str, tuple[int, ...]]] = {}
    holders: dict[tuple[Key, Extent], list[tuple[int, int]]] = {}
    for rank, offer in enumerate(offers):
        for key, (dtype, shape, extents) in offer.tensors.items():
            if told.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise PolyshardError(
                    f"'{'.'.join(key)}' is {dtype} of shape {shape} on rank {rank} and {told[key][0]} of shape "
                    f"{told[key][1]} on another. Make the same model and optimizer on every rank."
                )
            for index, extent in enumerate(extents):
                holders.setdefault((key, extent), []).append((rank, index))
    _require_apart(told, holders)
    shares: list[list[tuple[int, Key, int, Extent]]] = [[] for _ in offers]
    loads = [0] * len(offers)
    shared = []
    for (key, extent), candidates in holders.items():
        nbytes = math.prod(extent[1]) * DTYPES[told[key][0]].itemsize
        if len(candidates) > 1:
            shared.append((nbytes, key, extent, candidates))
            continue
        ((rank, index),) = candidates
        shares[rank].append((nbytes, key, index, extent))
        loads[rank] += nbytes
    # The largest first: what comes later evens out what they leave.
    for nbytes, key, extent, candidates in sorted(shared, key=lambda each: -each[0]):
        rank, index = min(candidates, key=lambda each: loads[each[0]])
        shares[rank].append((nbytes, key, index, extent))
        loads[rank] += nbytes
    chunks: dict[Key, list[Json]] = {key: [] for key in told}
    found = []
    for file, share in zip(files, shares, strict=True):
        share.sort(key=lambda each: each[0] > _SMALL)
        starts, _ = places(each[0] for each in share)
        for at, (nbytes, key, _, (offsets, sizes)) in zip(starts, share, strict=True):
            chunks[key].append(chunk_described(offsets, sizes, file, at, nbytes))
        found.append(Share([(key, index) for _, key, index, _ in share]))
    return found, {key: described(*told[key], chunks[key]) for key in told}


def places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The first byte of each chunk in its file, and the file's size. ``sizes``: of the chunks, in bytes."""
    starts, end = [], 0
    for nbytes in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + nbytes
    return starts, end


def _require_apart(
    told: Mapping[Key, tuple[str, tuple[int, ...]]], holders: Mapping[tuple[Key, Extent], Sequence[object]]
) -> None:
    held = dict.fromkeys(told, 0)
    for key, (_, sizes) in holders:
        held[key] += math.prod(sizes)
    wrong = next((key for key, numel in held.items() if numel > math.prod(told[key][1])), None)
    if wrong is not None:
        raise PolyshardError(
            f"Ranks hold parts of '{'.'.join(wrong)}' that overlap without being the same. Lay it out alike on every "
            "rank that holds it."
        )
