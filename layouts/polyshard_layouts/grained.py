"""Layouts that cut a parameter only between its grains: rows, or blocks.

[Note: where slices can end]
Slices are equal in size, so a parameter that reaches over two or more of their ends is cut in the same distances: its
grain must divide the slice. One that reaches over a single end only has to begin a whole number of grains before it.
One that reaches over none may begin anywhere. So the smallest slice is looked for among multiples of the grains of
parameters that are longer than two slices, and for each of these sizes parameters are set one after the other, in a
few orders.

Half as long as a parameter, a slice need no longer be a multiple of its grain. As long as the longest one, and with
room for one misplaced grain a parameter, any does: that is where the search ends at the latest, about a thousandth of
the slice in a step, and longer ones after many.

With grains that have no small common multiple, on many ranks, such a slice may be much longer than the unit's share.
Parameters of one grain each in a buffer of their own then leave less padding, for a communication each, and less still
where others fill what is left of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polyshard.interfaces import Arrangement, UnitGeometry

#: Padding, as a part of the unit, from which on several buffers are weighed against one. Less is not worth another
#: communication.
WORTH_DIVIDING = 0.01
#: And as bytes of the whole buffer: of small units, a few elements are a large part.
WORTH_DIVIDING_BYTES = 4096


class Grained(NamedTuple):
    """A parameter, and what it may be cut between."""

    position: int
    numel: int
    grain: int
    """Elements; 1 for a parameter that may be cut anywhere."""


def arranged(unit: UnitGeometry, grains: Sequence[int], by_rows: frozenset[int]) -> tuple[Arrangement, ...]:
    """``unit`` with each parameter cut between its ``grains`` only (elements, one a parameter), with little padding.

    ``by_rows``: what to say so of, see ``Arrangement``.
    """
    every = [
        Grained(position, parameter.numel, grain)
        for position, (parameter, grain) in enumerate(zip(unit.parameters, grains, strict=True))
    ]
    total = sum(each.numel for each in every)
    worth = max(total * WORTH_DIVIDING, WORTH_DIVIDING_BYTES / unit.itemsize)
    one = _in_one(unit, every)
    best = [one]
    if one.shard_numel * unit.shards - total > worth:
        for members in (_cuttable_apart(every), _by_grain(every), _filled(unit, every)):
            found = [_in_one(unit, each) for each in members]
            # Each buffer more must be worth itself.
            if (_size(best) - _size(found)) * unit.shards > worth * (len(found) - len(best)):
                best = found
    return tuple(
        Arrangement(each.order, each.offsets, each.shard_numel, by_rows.intersection(each.order)) for each in best
    )


def _size(arrangements: Sequence[Arrangement]) -> int:
    return sum(each.shard_numel for each in arrangements)


def _cuttable_apart(every: Sequence[Grained]) -> list[list[Grained]]:
    kinds = ([each for each in every if each.grain > 1], [each for each in every if each.grain == 1])
    return [kind for kind in kinds if kind]


def _by_grain(every: Sequence[Grained]) -> list[list[Grained]]:
    found: dict[int, list[Grained]] = {}
    for each in every:
        found.setdefault(each.grain, []).append(each)
    return list(found.values())


def _filled(unit: UnitGeometry, every: Sequence[Grained]) -> list[list[Grained]]:
    """A buffer for each grain, from the longest on, with others in what equal slices leave of it."""
    rest = sorted(every, key=lambda each: (-each.grain, -each.numel))
    found: list[list[Grained]] = []
    while rest:
        grain = rest[0].grain
        members = [each for each in rest if each.grain == grain]
        room = -sum(each.numel for each in members) % (grain * unit.shards)
        for each in rest[len(members) :]:
            if each.numel <= room:
                members.append(each)
                room -= each.numel
        found.append(members)
        rest = [each for each in rest if each not in members]
    return found


def _in_one(unit: UnitGeometry, members: Sequence[Grained]) -> Arrangement:
    total = sum(each.numel for each in members)
    by_size = sorted(members, key=lambda each: -each.numel)
    orders = (list(members), by_size, sorted(by_size, key=lambda each: -each.grain))
    size, tries = max(1, -(-total // unit.shards)), 0
    while True:
        often = [each for each in members if each.numel > 2 * size and each.grain > 1]
        multiple = math.lcm(*(each.grain for each in often))
        found = _aligned(unit, size, multiple)
        freed = min((-(-each.numel // 2) for each in often), default=found + 1)
        if freed <= found:
            size = freed
            continue
        for order in orders:
            offsets = _placed(unit, order, found)
            if offsets is not None:
                return Arrangement(tuple(each.position for each in order), tuple(offsets), found)
        tries += 1
        # Steps grow, for a hundred parameters on a thousand ranks are to be laid out while nobody waits.
        size = found + 1 + found * (1 + tries // 16) // 1000
        size = -(-size // unit.alignment) * unit.alignment


def _aligned(unit: UnitGeometry, size: int, multiple: int) -> int:
    """The smallest size of a slice that is at least ``size`` and a multiple of ``multiple``."""
    found = -(-size // multiple) * multiple
    both = math.lcm(multiple, unit.slice_alignment(found))
    return -(-found // both) * both


def _placed(unit: UnitGeometry, order: Sequence[Grained], size: int) -> list[int] | None:
    """Offsets of parameters one after the other in slices of ``size``; None where they do not fit."""
    offsets: list[int] = []
    cursor = 0
    for each in order:
        offset = -(-cursor // unit.alignment) * unit.alignment
        end = (offset // size + 1) * size
        if each.grain > 1 and offset + each.numel > end:
            offset = _before(unit, offset, end, each.grain)
            if offset < 0 or (offset + each.numel > end + size and size % each.grain):
                return None
        offsets.append(offset)
        cursor = offset + each.numel
        if cursor > size * unit.shards:
            return None
    return offsets


def _before(unit: UnitGeometry, offset: int, end: int, grain: int) -> int:
    """The first aligned place from ``offset`` on that is whole grains before ``end``, or ``end`` itself.

    Negative where ``end`` is not aligned, so that nothing may begin there, and no place before it is.
    """
    first = end - (end - offset) // grain * grain
    # Whole grains apart, places repeat their alignment after so many.
    for place in range(first, min(end, first + grain * unit.alignment) + 1, grain):
        if place % unit.alignment == 0:
            return place
    return -1
