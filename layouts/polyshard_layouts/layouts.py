"""The layouts ``flat``, ``rows`` and ``blocks``, and how the last two pack parameters into equal slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polyshard.errors import ConfigError
from polyshard.interfaces import Arrangement, Layout, ParameterGeometry, PluginContext, UnitGeometry


class Flat(Layout):
    """``flat``: the least padding. A cut may fall inside a row.

    Every slice has ``ceil(total / shards)`` elements, as in PyTorch's FSDP, and large ones are rounded up to 256 bytes.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        offsets, cursor, alignment = [], 0, unit.alignment
        for parameter in unit.parameters:
            offset = -(-cursor // alignment) * alignment
            offsets.append(offset)
            cursor = offset + parameter.numel
        shard_numel = unit.aligned_slice(-(-cursor // unit.shards))
        return (Arrangement(tuple(range(len(offsets))), tuple(offsets), shard_numel),)


class Rows(Layout):
    """``rows``: no index of dimension 0 is cut, so that a rank's piece is ``(rows, ...)``, and its shape says so.

    A vector is cut anywhere: each of its elements is a row. Parameters whose rows do not lie together in memory, such
    as a transposed matrix, lie as in ``flat``, and their pieces are 1-D.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        rows = [parameter.row_numel for parameter in unit.parameters]
        by_rows = frozenset(index for index, row in enumerate(rows) if row is not None)
        return arranged(unit, [max(1, row or 1) for row in rows], by_rows)


class Blocks(Layout):
    """``blocks``: for optimizers and casters that process elements in blocks, such as 8-bit states.

    Args:
        size: elements of a block, in the memory order of the parameter, whose last block may be shorter; or the height
            and width of a tile. With tiles, a row-major matrix is cut between multiples of the height, so that pieces
            are ``(rows, ...)``, and any other parameter anywhere.
        smallest: elements below which a parameter may be cut anywhere. 8-bit optimizers keep the state of small ones in
            full precision: torchao's and bitsandbytes' those of fewer than 4096.

    Raises:
        ConfigError: ``size`` is neither a positive number nor two of them, or ``smallest`` is negative.
    """

    api_version = 1

    def __init__(self, context: PluginContext, *, size: int | Sequence[int] = 256, smallest: int = 4096) -> None:
        del context
        sizes = [size] if isinstance(size, int) else list(size) if isinstance(size, Sequence) else []
        sound = all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in sizes)
        if not sound or len(sizes) not in (1, 2) or isinstance(size, bool | str):
            raise ConfigError(
                f"size of the layout 'blocks' must be a number of elements above 0, or [height, width] of a tile, not "
                f"{size!r}."
            )
        if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 0:
            raise ConfigError(f"smallest of the layout 'blocks' must be a number of elements, not {smallest!r}.")
        self._size = sizes[0]
        self._smallest = smallest
        self._tiles = len(sizes) == 2

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        if not self._tiles:
            return arranged(unit, [self._size if self._rules(each) else 1 for each in unit.parameters], frozenset())
        by_rows = frozenset(
            index for index, each in enumerate(unit.parameters) if _is_matrix(each) and self._rules(each)
        )
        grains = [
            self._size * (each.row_numel or 1) if index in by_rows else 1 for index, each in enumerate(unit.parameters)
        ]
        return arranged(unit, grains, by_rows)

    def _rules(self, parameter: ParameterGeometry) -> bool:
        return parameter.numel >= max(1, self._smallest)


def _is_matrix(parameter: ParameterGeometry) -> bool:
    return len(parameter.shape) == 2 and parameter.row_numel is not None


#: Padding, as a part of the unit, from which on several buffers are weighed against one. Less is not worth another
#: communication.
WORTH_DIVIDING = 0.01
#: And as bytes of the whole buffer: of small units, a few elements are a large part.
WORTH_DIVIDING_BYTES = 4096


# [Note: where slices can end]
# All slices of a buffer are equal. A parameter longer than two slices is cut at several ends, one slice apart, so the
# slice must be a multiple of its grain. A parameter that crosses one end must begin a whole number of grains before it.
# A parameter that crosses no end may begin anywhere. The search tries sizes that are multiples of the grains of all
# parameters longer than two slices, the smallest first, and for each size sets parameters one after the other, in three
# orders.
#
# The search ends: a slice half as long as a parameter need not be a multiple of its grain, and any order fits into a
# slice as long as the longest parameter and one grain of each. Steps are about a thousandth of the slice, and grow.
#
# Grains without a small common multiple, on many ranks, may need a slice much longer than the unit's share. Several
# buffers then pad less, each for one more communication: one buffer a grain, and less still where smaller parameters
# fill the rest of it.


class Grained(NamedTuple):
    """A parameter, and the grain between whose multiples it may be cut."""

    position: int
    numel: int
    grain: int
    """Elements; 1 for a parameter that may be cut anywhere."""


def arranged(unit: UnitGeometry, grains: Sequence[int], by_rows: frozenset[int]) -> tuple[Arrangement, ...]:
    """``unit`` with each parameter cut between its ``grains`` only (elements, one a parameter), with little padding.

    ``by_rows``: indices of parameters that are cut by rows, for ``Arrangement``.
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
