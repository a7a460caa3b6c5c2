"""What ranks offer to write of a checkpoint, and who writes what, where: decided by one rank, for all at once.

Columns of numbers, not objects: of a model of some billion parameters, sixteen thousand ranks have ten million rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import PolyshardError
from ..io.boxes import Box, Numbers, disjoint
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
    """What one rank holds."""

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
class Share:
    """What one rank writes, in the order of its file."""

    rows: Numbers
    """Of those that it offered."""
    parts: Mapping[int, Box]
    """By place in ``rows``, where it is not all of the box."""


@dataclass(frozen=True)
class Shares:
    of_ranks: Sequence[Share]
    stored: Mapping[Key, StoredTensor]
    ends: Sequence[int]
    """Behind the last byte of each rank's file."""


def share_out(offers: Sequence[Offer], *, complete: bool = False) -> Shares:
    """Let each box be written by one rank, of those that hold it the one that has least to write so far.

    Where ranks cut their copies otherwise than others do, what is written is the part of a box that no other has.

    ``complete``: whether all ranks offer, so that nothing may be missing.

    Raises PolyshardError: ranks differ in what a tensor is, or lack parts of it.
    """
    kinds = _kinds(offers)
    numbers = {key: number for number, key in enumerate(kinds)}
    require_alike([offer.numbers for offer in offers])
    table = _Table.of(offers, kinds, numbers)
    left_out = _left_out(offers, kinds, numbers, table, complete=complete)
    table = table.without(left_out)
    items = table.items(kinds, left_out, complete=complete)
    ranks, rows = table.chosen(items)
    return _laid_out(items, ranks, rows, kinds, left_out, len(offers))


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


def places(nbytes: Numbers) -> Numbers:
    """The first byte of each archive of a file, and one past the last. ``nbytes``: of the archives."""
    ends = np.zeros(len(nbytes) + 1, np.int64)
    np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT, out=ends[1:])
    return ends


_Kinds = Mapping[Key, tuple[str, tuple[int, ...]]]


def _kinds(offers: Sequence[Offer]) -> _Kinds:
    kinds: dict[Key, tuple[str, tuple[int, ...]]] = {}
    seen: set[int] = set()
    for rank, offer in enumerate(offers):
        # Ranks share what is alike.
        if id(offer.kinds) in seen:
            continue
        seen.add(id(offer.kinds))
        for key, dtype, shape in offer.kinds:
            if kinds.setdefault(key, (dtype, shape)) != (dtype, shape) and not _may_differ(offers, key):
                raise PolyshardError(
                    f"'{'.'.join(key)}' is {dtype} of shape {shape} on rank {rank} and {kinds[key][0]} of shape "
                    f"{kinds[key][1]} on another. Make the same model and optimizer on every rank."
                )
    return kinds


def _may_differ(offers: Sequence[Offer], key: Key) -> bool:
    return any(key in offer.kept for offer in offers)


@dataclass(frozen=True)
class _Items:
    """What is to be written: boxes that have each element once."""

    kinds: Numbers
    offsets: Numbers
    sizes: Numbers
    nbytes: Numbers
    groups: Numbers
    """Which boxes they are of, or parts of."""
    parts: Mapping[int, Box]
    """Those that are parts."""


@dataclass(frozen=True)
class _Table:
    """All ranks' boxes, equal ones behind each other."""

    kinds: Numbers
    boxes: Numbers
    """First indices and extents."""
    ranks: Numbers
    rows: Numbers
    """In its rank's offer."""
    starts: Numbers
    """The first of each group of equal boxes."""

    @classmethod
    def of(cls, offers: Sequence[Offer], kinds: _Kinds, numbers: Mapping[Key, int]) -> _Table:
        most = max((len(shape) for _, shape in kinds.values()), default=0)
        known: dict[int, Numbers] = {}
        columns = []
        for rank, offer in enumerate(offers):
            if id(offer.kinds) not in known:
                known[id(offer.kinds)] = np.array([numbers[key] for key, *_ in offer.kinds], np.int64)
            own, count = (offer.rows.shape[1] - 1) // 2, len(offer.rows)
            found = np.zeros((count, 3 + 2 * most), np.int64)
            found[:, 0] = known[id(offer.kinds)][offer.rows[:, 0]] if count else 0
            found[:, 1 : 1 + own] = offer.rows[:, 1 : 1 + own]
            found[:, 1 + most : 1 + 2 * most] = 1
            found[:, 1 + most : 1 + most + own] = offer.rows[:, 1 + own :]
            found[:, -2] = rank
            found[:, -1] = np.arange(count)
            columns.append(found)
        return cls._sorted(np.concatenate(columns))

    @classmethod
    def _sorted(cls, found: Numbers) -> _Table:
        order = np.lexsort(found.T[-2::-1])
        found = found[order]
        boxes = found[:, :-2]
        is_first = np.ones(len(found), bool)
        is_first[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
        return cls(found[:, 0], boxes[:, 1:], found[:, -2], found[:, -1], np.flatnonzero(is_first))

    def without(self, kinds: set[int]) -> _Table:
        if not kinds:
            return self
        found = np.concatenate([self.kinds[:, None], self.boxes, self.ranks[:, None], self.rows[:, None]], axis=1)
        return self._sorted(found[~np.isin(self.kinds, list(kinds))])

    @property
    def first_kinds(self) -> Numbers:
        return self.kinds[self.starts]

    def sizes(self) -> Numbers:
        """Extents of each group's box."""
        found: Numbers = self.boxes[self.starts][:, self.boxes.shape[1] // 2 :]
        return found

    def items(self, kinds: _Kinds, left_out: set[int], *, complete: bool) -> _Items:
        """Raises PolyshardError: together they are no whole tensor, though they are to be."""
        half = self.boxes.shape[1] // 2
        first, boxes = self.first_kinds, self.boxes[self.starts]
        numel = boxes[:, half:].prod(axis=1)
        held = np.zeros(len(kinds), np.int64)
        np.add.at(held, first, numel)
        groups = np.arange(len(first))
        parts: list[tuple[int, Box]] = []
        for number, (key, (_, shape)) in enumerate(kinds.items()):
            have, wanted = int(held[number]), math.prod(shape)
            if have > wanted:
                own = np.flatnonzero(first == number)
                cut = list(disjoint([_box(boxes[group], len(shape)) for group in own]))
                parts += [(int(own[index]), part) for index, part in cut]
                groups = groups[~np.isin(groups, own)]
                have = sum(part.numel for _, part in cut)
            if have < wanted and complete and number not in left_out:
                raise PolyshardError(
                    f"Ranks hold {have} of the {wanted} elements of '{'.'.join(key)}': some have no such state of "
                    "their part of the parameter. Let every rank step its part, by a gradient of zeros where it has "
                    "no other."
                )
        groups = np.concatenate([groups, np.array([group for group, _ in parts], np.int64)])
        found = boxes[groups]
        for place, (_, part) in enumerate(parts, len(groups) - len(parts)):
            found[place, : len(part.offsets)] = part.offsets
            found[place, half : half + len(part.sizes)] = part.sizes
        itemsizes = np.array([DTYPES[dtype].itemsize for dtype, _ in kinds.values()], np.int64)
        nbytes = found[:, half:].prod(axis=1) * itemsizes[first[groups]]
        cut_items = {
            place: part
            for place, (group, part) in enumerate(parts, len(groups) - len(parts))
            if part != _box(boxes[group], len(part.sizes))
        }
        return _Items(first[groups], found[:, :half], found[:, half:], nbytes, groups, cut_items)

    def chosen(self, items: _Items) -> tuple[Numbers, Numbers]:
        """The rank that writes each item, and the row in its offer."""
        stops = np.append(self.starts[1:], len(self.kinds))
        starts, stops = self.starts[items.groups], stops[items.groups]
        alone = stops - starts == 1
        chosen = starts.copy()
        most = int(self.ranks.max()) + 1 if len(self.ranks) else 1
        loads = np.bincount(self.ranks[starts[alone]], items.nbytes[alone], minlength=most).astype(np.int64)
        # The largest first: smaller ones even out the rest.
        shared = np.flatnonzero(~alone)
        for item in shared[np.argsort(-items.nbytes[shared], kind="stable")].tolist():
            candidates = self.ranks[starts[item] : stops[item]]
            index = int(loads[candidates].argmin())
            chosen[item] += index
            loads[candidates[index]] += items.nbytes[item]
        return self.ranks[chosen], self.rows[chosen]


def _box(numbers: Numbers, ndim: int) -> Box:
    half = len(numbers) // 2
    return Box(tuple(numbers[:ndim].tolist()), tuple(numbers[half : half + ndim].tolist()))


def _left_out(
    offers: Sequence[Offer], kinds: _Kinds, numbers: Mapping[Key, int], table: _Table, *, complete: bool
) -> set[int]:
    """Those of kinds that are not written: a tensor that pieces are written of, or these where it is written."""
    numels: dict[str, dict[str, tuple[int, int]]] = {}
    pieces: dict[Key, set[Key]] = {}
    forms: dict[Key, set[tuple[str, tuple[int, ...]]]] = {}
    for offer in offers:
        known = {key: (dtype, shape) for key, dtype, shape in offer.kinds if key in offer.kept}
        for key, (label, numel, wanted) in offer.kept.items():
            numels.setdefault(key[2], {})[label] = (numel, wanted)
            pieces.setdefault(key, set()).add(piece_of(key, label))
            forms.setdefault(key, set()).add(known[key])
    sizes, first = table.sizes(), table.first_kinds
    found: set[int] = set()
    for key, own in pieces.items():
        each = numels[key[2]].values()
        # Otherwise some rank has no state at all.
        has_all = complete and sum(numel for numel, _ in each) >= max(each)[1]
        at = np.flatnonzero(first == numbers[key])
        held, wanted = int(sizes[at].prod(axis=1).sum()), math.prod(kinds[key][1])
        if held > wanted:
            boxes = [_box(table.boxes[table.starts[group]], len(kinds[key][1])) for group in at]
            held = sum(part.numel for _, part in disjoint(boxes))
        parted = has_all and (len(forms[key]) > 1 or held < wanted)
        found |= {numbers[key]} if parted else {numbers[piece] for piece in own}
    return found


def piece_of(key: Key, label: str) -> Key:
    """The key of the piece ``label`` of a tensor, where pieces are written by themselves."""
    return (*key[:-1], f"{key[-1]}{label}")


def _laid_out(
    items: _Items, ranks: Numbers, rows: Numbers, kinds: _Kinds, left_out: set[int], world_size: int
) -> Shares:
    order = np.lexsort((np.arange(len(ranks)), items.kinds, items.nbytes > _IN_FRONT, ranks))
    ndims = [len(shape) for _, shape in kinds.values()]
    heads, nbytes = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
    by_kind = np.argsort(items.kinds, kind="stable")
    bounds = np.searchsorted(items.kinds[by_kind], np.arange(len(kinds) + 1))
    for number, (dtype, _) in enumerate(kinds.values()):
        own = by_kind[bounds[number] : bounds[number + 1]]
        before, behind = lengths(DTYPES[dtype], items.sizes[own, : ndims[number]])
        heads[own], nbytes[own] = before, before + items.nbytes[own] + behind
    starts = places(nbytes[order])
    edges = np.searchsorted(ranks[order], np.arange(world_size + 1))
    at = np.zeros(len(ranks), np.int64)
    at[order] = starts[:-1] - starts[edges[ranks[order]]]
    parts: list[dict[int, Box]] = [{} for _ in range(world_size)]
    if items.parts:
        place = np.empty(len(ranks), np.int64)
        place[order] = np.arange(len(ranks)) - edges[ranks[order]]
        for item, part in items.parts.items():
            parts[ranks[item]][int(place[item])] = part
    shares = [Share(rows[order[edges[rank] : edges[rank + 1]]], parts[rank]) for rank in range(world_size)]
    stored = {}
    for number, (key, (dtype, shape)) in enumerate(kinds.items()):
        if number in left_out:
            continue
        own, ndim = by_kind[bounds[number] : bounds[number + 1]], ndims[number]
        columns = (items.offsets[own, :ndim], items.sizes[own, :ndim], ranks[own], at[own] + heads[own])
        stored[key] = StoredTensor(DTYPES[dtype], shape, *columns)
    ends = starts[edges[1:]] - starts[edges[:-1]]
    return Shares(shares, stored, ends.tolist())
