"""What ranks offer to write of a checkpoint, and who writes what, where: decided by one rank, for all at once.

Columns of numbers, not objects: of a model of some billion parameters, sixteen thousand ranks have ten million rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ..errors import PolyshardError
from ..io.boxes import Box, Numbers
from ..io.memory import DTYPES
from .archive import ALIGNMENT, lengths
from .encoding import Json
from .manifest import StoredTensor

#: ``("model", name)``, or ``("optimizer", "state", name, key)``.
Key = tuple[str, ...]
#: The key, the name of the dtype and the shape of a whole tensor.
Kind = tuple[Key, str, tuple[int, ...]]
#: Up to here a box is put to the front of its file, where one block has many that are read by themselves.
_IN_FRONT = 4096


@dataclass(frozen=True)
class Offer:
    kinds: tuple[Kind, ...]
    """Of tensors, those of which it holds nothing too."""
    rows: Numbers
    """A box each: the number of its kind, and first indices and extents in as many dimensions as any tensor has."""
    values: Mapping[Key, Json] = field(default_factory=dict)
    """Optimizer state that is no tensor, encoded."""
    numbers: Mapping[Key, str] = field(default_factory=dict)
    """Of tensors of one element that other ranks have of other parts of the parameter, in words."""
    kept: Mapping[Key, tuple[str, int, int]] = field(default_factory=dict)
    """Of tensors that may be written piece by piece, and are offered so, too: the label of the piece, its elements, and
    the parameter's."""

    @classmethod
    def of(cls, boxes: Sequence[tuple[Kind, Sequence[Box]]], **others: Any) -> Offer:
        most = max((len(shape) for (_, _, shape), _ in boxes), default=0)
        rows = np.zeros((sum(len(each) for _, each in boxes), 1 + 2 * most), np.int64)
        # An extent of one where there is no such dimension.
        rows[:, 1 + most :] = 1
        cursor = 0
        for number, (_, each) in enumerate(boxes):
            for box in each:
                rows[cursor, 0] = number
                rows[cursor, 1 : 1 + len(box.offsets)] = box.offsets
                rows[cursor, 1 + most : 1 + most + len(box.sizes)] = box.sizes
                cursor += 1
        return cls(tuple(kind for kind, _ in boxes), rows, **others)


@dataclass(frozen=True)
class Shares:
    of_ranks: Sequence[Numbers]
    """What each rank writes, in the order of its file: rows of its offer."""
    stored: Mapping[Key, StoredTensor]
    ends: Sequence[int]
    """Behind the last byte of each rank's file."""


def share_out(offers: Sequence[Offer], *, complete: bool = False) -> Shares:
    """Let each box be written by one rank, of those that hold it the one that has least to write so far.

    ``complete``: whether all ranks offer, so that nothing may be missing.

    Raises PolyshardError: ranks differ in what a tensor is or in how they cut it, or lack parts of it.
    """
    tensors = _tensors(offers)
    for key in _left_out(offers, tensors, complete=complete):
        del tensors[key]
    for key, each in tensors.items():
        if each.held > math.prod(each.shape):
            raise PolyshardError(
                f"Ranks hold {each.held} elements of '{'.'.join(key)}', which has {math.prod(each.shape)}: some cut "
                "their copies otherwise than others do. Let all replicas cut a parameter alike."
            )
        if each.held < math.prod(each.shape) and complete:
            raise PolyshardError(
                f"Ranks hold {each.held} of the {math.prod(each.shape)} elements of '{'.'.join(key)}': some have no "
                "such state of their part of the parameter. Let every rank step its part, by a gradient of zeros where "
                "it has no other."
            )
    ranks, rows = _chosen(list(tensors.values()), len(offers))
    return _laid_out(tensors, ranks, rows, len(offers))


def require_alike(numbers_of_ranks: Sequence[Mapping[Key, str]]) -> None:
    """Raise PolyshardError where ranks with different parts of a parameter have another number each for its state."""
    known: dict[Key, tuple[int, str]] = {}
    for rank, numbers in enumerate(numbers_of_ranks):
        for key, number in numbers.items():
            first, other = known.setdefault(key, (rank, number))
            if number != other:
                raise PolyshardError(
                    f"'{'.'.join(key)}' is {other} on rank {first} and {number} on rank {rank}, which hold different "
                    "parts of the parameter: a checkpoint has one for all of it. Let every rank step its part as "
                    "often, by a gradient of zeros where it has no other."
                )


class _Tensor:
    """One that ranks offer: boxes that have each element once, and who holds each of these."""

    def __init__(self, dtype: str, shape: tuple[int, ...], found: Numbers) -> None:
        """``found``: a row for each box of each rank: the rank, the row in its offer, first indices, and extents."""
        self.dtype, self.shape = DTYPES[dtype], shape
        found = found[np.lexsort((found[:, 0], *found.T[:1:-1]))]
        boxes = found[:, 2:]
        is_first = np.ones(len(found), bool)
        is_first[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
        starts = np.flatnonzero(is_first)
        self.ranks, self.rows = found[:, 0], found[:, 1]
        self.offsets, self.sizes = np.split(boxes[starts], 2, axis=1)
        self.holders = np.stack([starts, np.append(starts, len(found))[1:]])
        """The first one of each box in ``ranks``, and one past the last."""

    @property
    def held(self) -> int:
        return int(self.sizes.prod(axis=1).sum())

    @property
    def nbytes(self) -> Numbers:
        found: Numbers = self.sizes.prod(axis=1) * self.dtype.itemsize
        return found


def _tensors(offers: Sequence[Offer]) -> dict[Key, _Tensor]:
    """Raises PolyshardError: ranks differ in what one is."""
    kinds: dict[Key, tuple[str, tuple[int, ...]]] = {}
    # Ranks share what is alike.
    firsts = {id(offer.kinds): rank for rank, offer in reversed(list(enumerate(offers)))}
    for rank in sorted(firsts.values()):
        for key, dtype, shape in offers[rank].kinds:
            # Of what may be written by pieces, each has its own form.
            if kinds.setdefault(key, (dtype, shape)) != (dtype, shape) and not any(key in each.kept for each in offers):
                raise PolyshardError(
                    f"'{'.'.join(key)}' is {dtype} of shape {shape} on rank {rank} and {kinds[key][0]} of shape "
                    f"{kinds[key][1]} on another. Make the same model and optimizer on every rank."
                )
    numbers = {key: number for number, key in enumerate(kinds)}
    of_kinds = {
        each: np.array([numbers[key] for key, *_ in offers[rank].kinds], np.int64) for each, rank in firsts.items()
    }
    most = max((len(shape) for _, shape in kinds.values()), default=0)
    columns = []
    for rank, offer in enumerate(offers):
        own = (offer.rows.shape[1] - 1) // 2
        found = np.zeros((len(offer.rows), 3 + 2 * most), np.int64)
        found[:, 0] = of_kinds[id(offer.kinds)][offer.rows[:, 0]]
        found[:, 1], found[:, 2] = rank, np.arange(len(found))
        found[:, 3 : 3 + own] = offer.rows[:, 1 : 1 + own]
        found[:, 3 + most : 3 + most + own] = offer.rows[:, 1 + own :]
        columns.append(found)
    table = np.concatenate(columns)
    table = table[np.argsort(table[:, 0], kind="stable")]
    bounds = np.searchsorted(table[:, 0], np.arange(len(kinds) + 1)).tolist()
    result = {}
    for (key, (dtype, shape)), start, stop in zip(kinds.items(), bounds, bounds[1:], strict=False):
        dims = np.arange(len(shape))
        result[key] = _Tensor(dtype, shape, table[start:stop, np.concatenate([[1, 2], 3 + dims, 3 + most + dims])])
    return result


def _left_out(offers: Sequence[Offer], tensors: Mapping[Key, _Tensor], *, complete: bool) -> set[Key]:
    """Those that are not written: a tensor that pieces are written of, or these where it is written."""
    numels: dict[str, dict[str, tuple[int, int]]] = {}
    pieces: dict[Key, set[Key]] = {}
    forms: dict[Key, set[tuple[str, tuple[int, ...]]]] = {}
    for offer in offers:
        known = {key: (dtype, shape) for key, dtype, shape in offer.kinds if key in offer.kept}
        for key, (label, numel, wanted) in offer.kept.items():
            numels.setdefault(key[2], {})[label] = (numel, wanted)
            pieces.setdefault(key, set()).add(piece_of(key, label))
            forms.setdefault(key, set()).add(known[key])
    found: set[Key] = set()
    for key, own in pieces.items():
        each = numels[key[2]].values()
        # Otherwise some rank has no state at all.
        has_all = complete and sum(numel for numel, _ in each) >= max(each)[1]
        parted = has_all and (len(forms[key]) > 1 or tensors[key].held < math.prod(tensors[key].shape))
        found |= {key} if parted else own
    return found


def piece_of(key: Key, label: str) -> Key:
    """The key of the piece ``label`` of a tensor, where pieces are written by themselves."""
    return (*key[:-1], f"{key[-1]}{label}")


def _chosen(tensors: Sequence[_Tensor], world_size: int) -> tuple[Numbers, Numbers]:
    """The rank that writes each box, and the row in its offer."""
    ranks, rows, nbytes = (_joined([getattr(each, name) for each in tensors]) for name in ("ranks", "rows", "nbytes"))
    before = accumulate((len(each.ranks) for each in tensors), initial=0)
    holders = [each.holders + first for each, first in zip(tensors, before, strict=False)]
    chosen, stops = (_joined([each[end] for each in holders]) for end in (0, 1))
    alone = stops - chosen == 1
    loads = np.bincount(ranks[chosen[alone]], nbytes[alone], minlength=world_size).astype(np.int64)
    # The largest first: smaller ones even out the rest.
    shared = np.flatnonzero(~alone)
    for item in shared[np.argsort(-nbytes[shared], kind="stable")].tolist():
        candidates = ranks[chosen[item] : stops[item]]
        index = int(loads[candidates].argmin())
        chosen[item] += index
        loads[candidates[index]] += nbytes[item]
    return ranks[chosen], rows[chosen]


def _laid_out(tensors: Mapping[Key, _Tensor], ranks: Numbers, rows: Numbers, world_size: int) -> Shares:
    """``ranks``, ``rows``: of each box, as ``_chosen`` gives them."""
    beside = [lengths(each.dtype, each.sizes) for each in tensors.values()]
    heads, tails = (_joined([each[end] for each in beside]) for end in (0, 1))
    nbytes = _joined([each.nbytes for each in tensors.values()])
    order = np.lexsort((nbytes > _IN_FRONT, ranks))
    edges = np.searchsorted(ranks[order], np.arange(world_size + 1))
    archives = (heads + nbytes + tails)[order]
    starts = np.append(0, np.cumsum(-(-archives // ALIGNMENT) * ALIGNMENT))
    first = edges[ranks[order]]
    at = np.zeros(len(ranks), np.int64)
    at[order] = starts[:-1] - starts[first] + heads[order]
    stored, begin = {}, 0
    for key, each in tensors.items():
        own = slice(begin, begin := begin + len(each.sizes))
        stored[key] = StoredTensor(each.dtype, each.shape, each.offsets, each.sizes, ranks[own], at[own])
    shares = [rows[order[edges[rank] : edges[rank + 1]]] for rank in range(world_size)]
    return Shares(shares, stored, (starts[edges[1:]] - starts[edges[:-1]]).tolist())


def _joined(columns: Sequence[Numbers]) -> Numbers:
    return np.concatenate([np.zeros(0, np.int64), *columns])
