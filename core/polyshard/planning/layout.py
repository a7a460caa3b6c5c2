"""The places of parameters in a unit's flat buffer, how ranks cut it, and checks of a layout plugin's answer.

Pure arithmetic.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, PluginContractError
from ..interfaces import Arrangement, Layout, UnitGeometry


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the flat buffer."""

    offset: int
    """First element, counted from the start of the unit."""
    numel: int
    """Number of elements."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    stride: tuple[int, ...]
    """Strides of the whole parameter; a permutation of contiguous ones, so that it fills its range without gaps."""
    by_rows: bool = False
    """Whether it is cut between rows of dimension 0 only, and its pieces are shown as such."""
    segment: int = 0
    """Index of the segment that it lies in."""
    dim: int = 0
    """The dimension along which it is cut evenly. Above 0 it is *staged*: ranks send and receive its pieces one after
    the other, and each is a block of the whole parameter instead of a range."""

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def shown(self, numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a piece of so many elements: ``(rows, ...)`` where it is whole rows, else 1-D.

        Of a staged parameter, all of its dimensions, the cut one shorter; row-major.
        """
        if self.dim:
            each = self.numel // self.shape[self.dim] if self.numel else 0
            local = (*self.shape[: self.dim], numel // each if each else 0, *self.shape[self.dim + 1 :])
            return local, contiguous_stride(local)
        if not self.by_rows:
            return (numel,), (1,)
        row = product(self.shape[1:])
        return (numel // row if row else 0, *self.shape[1:]), self.stride


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of one parameter that lie in one rank's shard."""

    slot: int
    """Index of the parameter."""
    start: int
    """First element within the parameter, in storage order; of a staged one, in the order of ranks."""
    stop: int
    """One past the last element within the parameter."""
    shard_offset: int
    """First element within the rank's shard."""

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the flat buffer that is cut into slices by itself."""

    start: int
    """First element of each rank's slice within its shard. Times the number of ranks, the first in the flat buffer."""
    numel: int
    """Elements of one slice."""


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A unit's flat buffer of ``world_size`` equal shards.

    A buffer of several *segments* is cut one by one: a rank's shard is its slice of the first, then of the second, and
    so on. They lie one behind the other, up to a few elements that align each of them.

    Invariants: slots are in order and do not overlap; every slot ends at or before ``numel``;
    ``numel <= padded_numel == world_size * shard_numel``; a slot lies in one segment.
    """

    slots: tuple[Slot, ...]
    numel: int
    """Elements up to the end of the last parameter, gaps for alignment included."""
    shard_numel: int
    world_size: int
    segments: tuple[Segment, ...] = ()
    """In order; empty where the buffer is cut as a whole, which costs a step nothing more."""

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding at the end included."""
        return self.shard_numel * self.world_size

    @property
    def slices(self) -> tuple[int, ...]:
        """Elements of one slice of each segment."""
        return tuple(each.numel for each in self.segments) or (self.shard_numel,)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each slice in a rank's shard."""
        return tuple(each.start for each in self.segments) or (0,)

    @property
    def staged(self) -> tuple[int, ...]:
        """Indices of the parameters that are cut along another dimension than 0."""
        return tuple(index for index, slot in enumerate(self.slots) if slot.dim)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The non-empty pieces of parameters in ``rank``'s shard, in order.

        Raises IndexError: ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in range({self.world_size})")
        found = []
        for each in self.segments or (Segment(0, self.shard_numel),):
            begin = self.world_size * each.start + rank * each.numel
            found += self._pieces_in(begin, begin + each.numel - 1, begin - each.start)
        return tuple(found)

    def range_of(self, slot: int, rank: int) -> tuple[int, int]:
        """First and one past the last element of ``slot`` in ``rank``'s shard, as in ``Piece``; (0, 0) for none."""
        where = self.slots[slot]
        start, size = 0, self.shard_numel
        if self.segments:
            start, size = self.segments[where.segment].start, self.segments[where.segment].numel
        begin = self.world_size * start + rank * size
        low, high = max(where.offset, begin), min(where.end, begin + size)
        return (low - where.offset, high - where.offset) if low < high else (0, 0)

    def pieces_in(self, start: int, end: int) -> tuple[Piece, ...]:
        """The non-empty pieces of parameters in elements ``start`` to ``end`` (inclusive) of the whole buffer."""
        return tuple(self._pieces_in(start, end, start))

    def _pieces_in(self, start: int, end: int, origin: int) -> list[Piece]:
        """Those of ``pieces_in``, their places counted from ``origin``."""
        first = bisect.bisect_right(self.slots, start, key=lambda slot: slot.end)
        found = []
        for index in range(first, len(self.slots)):
            slot = self.slots[index]
            low, high = max(slot.offset, start), min(slot.end, end + 1)
            if slot.offset > end:
                break
            if low < high:
                found.append(Piece(index, low - slot.offset, high - slot.offset, low - origin))
        return found

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(offset, numel)`` of every range that belongs to no parameter."""
        filled = [(slot.offset, slot.end) for slot in self.slots]
        return _between(filled, self.padded_numel)

    def pads(self) -> tuple[tuple[int, int], ...]:
        """``(offset, numel)`` of every range of a shard that belongs to no segment."""
        filled = [(each.start, each.start + each.numel) for each in self.segments] or [(0, self.shard_numel)]
        return _between(filled, self.shard_numel)


def _between(filled: Sequence[tuple[int, int]], numel: int) -> tuple[tuple[int, int], ...]:
    """``(offset, numel)`` of what the ranges ``filled`` (first, one past the last; in order) leave of ``numel``."""
    found, cursor = [], 0
    for start, end in filled:
        if start == end:
            # One may lie inside of a gap, which is one all the same.
            continue
        if start > cursor:
            found.append((cursor, start - cursor))
        cursor = end
    if numel > cursor:
        found.append((cursor, numel - cursor))
    return tuple(found)


def laid_out(unit: UnitGeometry, arrangements: Sequence[Arrangement]) -> tuple[tuple[int, ...], FlatLayout]:
    """The buffer of ``unit``, a segment for each of ``arrangements``: indices of parameters in order, and where."""
    slots: list[Slot] = []
    segments: list[Segment] = []
    cursor = 0
    for number, arrangement in enumerate(arrangements):
        size = arrangement.shard_numel
        # Slices that are prescribed may end anywhere.
        start = round_up(cursor, max(unit.alignment, unit.slice_alignment(size)))
        for index, offset in zip(arrangement.order, arrangement.offsets, strict=True):
            each = unit.parameters[index]
            place, dim = start * unit.shards + offset, arrangement.dim if unit.shards > 1 else 0
            by_rows = index in arrangement.by_rows
            slots.append(Slot(place, each.numel, each.shape, each.stride, by_rows, number, dim))
        segments.append(Segment(start, size))
        cursor = start + size
    order = tuple(index for each in arrangements for index in each.order)
    if unit.shards == 1 or (len(segments) == 1 and not arrangements[0].dim):
        # Nothing is cut, or all alike.
        segments = []
        if len(arrangements) > 1:
            slots = [replace(slot, segment=0) for slot in slots]
    return order, FlatLayout(tuple(slots), slots[-1].end, cursor, unit.shards, tuple(segments))


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """A layout, and how messages name it."""

    layout: Layout
    label: str
    """The plugin, its group and the package that it is from."""

    def arrange(self, unit: UnitGeometry, rank: int) -> tuple[tuple[int, ...], FlatLayout]:
        """The buffer of ``unit``: indices of its parameters, in the order in which they lie, and where.

        Raises:
            ConfigError: the layout did, for what the user asked of it.
            PluginContractError: the layout failed, or answered what its contract does not allow.
        """
        where = f"{self.label} for unit '{unit.name}' of {unit.shards} shards (rank {rank})"
        try:
            answer: Any = self.layout.arrange(unit)
            segments: Any = tuple(answer) if isinstance(answer, Sequence) else None
        except KeyboardInterrupt:
            raise
        except ConfigError as error:
            raise ConfigError(f"arrange() of {where} refused: {error}") from error
        # SystemExit too: one rank would end in silence, and the others wait for it.
        except BaseException as error:
            raise PluginContractError(f"arrange() of {where} failed: {type(error).__name__}: {error}") from error
        fault = _fault(unit, answer, segments)
        if fault:
            raise PluginContractError(f"arrange() of {where} answered {fault}.")
        return laid_out(unit, segments)


def _fault(unit: UnitGeometry, answer: Any, segments: Any) -> str:
    """The fault of ``answer``, whose segments are ``segments``, and the right answer, as text; empty for no fault."""
    if segments is None or not all(isinstance(each, Arrangement) for each in segments):
        return f"{answer!r}, which is no sequence of Arrangements. Return one for each segment, nearly always one"
    taken: set[int] = set()
    for each in segments:
        known = len(unit.parameters)
        if not _are_numbers(each.order) or max(each.order, default=-1) >= known:
            return f"the order {each.order!r}, of {known} parameters. Answer a tuple of their indices, from 0"
        for index in each.order:
            if index in taken:
                return f"'{unit.parameters[index].name}' twice. Let each parameter lie in one segment, once"
            taken.add(index)
    missing = [each.name for index, each in enumerate(unit.parameters) if index not in taken]
    if missing:
        return f"no place for '{missing[0]}'. Let each parameter lie in one segment, empty ones too"
    return next((fault for fault in (_fault_of(unit, each) for each in segments) if fault), "")


def _are_numbers(values: Any) -> bool:
    """Whether ``values`` is a tuple of ints that are not negative, and not bools."""
    return isinstance(values, tuple) and {*map(type, values)} <= {int} and min(values, default=0) >= 0


def _fault_of(unit: UnitGeometry, arrangement: Arrangement) -> str:
    size, offsets = arrangement.shard_numel, arrangement.offsets
    if not _are_numbers(offsets) or not _are_numbers((size,)):
        return f"{arrangement!r}, whose offsets and sizes are not all numbers of elements. Answer with ints in a tuple"
    if not arrangement.order or len(offsets) != len(arrangement.order):
        return f"{len(offsets)} offsets for {len(arrangement.order)} parameters in one segment. Answer one for each"
    end, before, alignment = 0, "", unit.alignment
    for index, offset in zip(arrangement.order, offsets, strict=True):
        parameter = unit.parameters[index]
        if offset < end:
            return (
                f"the offset {offset} for '{parameter.name}', but '{before}' ends at {end}: they overlap, or are "
                "not in the order of their offsets"
            )
        if offset % alignment:
            return (
                f"the offset {offset} for '{parameter.name}', which is no multiple of {alignment} elements. Align each "
                "parameter to UnitGeometry.alignment"
            )
        end, before = offset + parameter.numel, parameter.name
    if end > size * unit.shards:
        return (
            f"slices of {size} elements, {size * unit.shards} together, but '{before}' ends at {end}. Make slices "
            "longer"
        )
    if size != unit.aligned_slice(size) and not arrangement.exact:
        return (
            f"slices of {size} elements, which is no multiple of {unit.slice_alignment(size)}. Round it up by "
            "UnitGeometry.aligned_slice"
        )
    if arrangement.by_rows != frozenset():
        return _fault_of_rows(unit, arrangement)
    return _fault_of_dim(unit, arrangement)


def _fault_of_dim(unit: UnitGeometry, arrangement: Arrangement) -> str:
    dim: Any = arrangement.dim
    if type(dim) is not int or dim < 0:
        return f"dim {dim!r}. Answer the number of a dimension"
    if not dim:
        return ""
    parameter = unit.parameters[arrangement.order[0]]
    where = f"dim {dim} for '{parameter.name}' of shape {parameter.shape}"
    if len(arrangement.order) > 1 or arrangement.offsets[0]:
        return f"{where}, which does not fill its segment. Let a parameter that is cut along it lie alone, from 0 on"
    if dim >= len(parameter.shape) or parameter.shape[dim] % unit.shards:
        return f"{where}, which {unit.shards} ranks do not divide evenly"
    if arrangement.shard_numel * unit.shards != parameter.numel:
        return f"{where}, in slices of {arrangement.shard_numel} elements. Answer {parameter.numel // unit.shards}"
    return ""


def _fault_of_rows(unit: UnitGeometry, arrangement: Arrangement) -> str:
    by_rows: Any = arrangement.by_rows
    if not isinstance(by_rows, frozenset) or not by_rows.issubset(arrangement.order):
        return f"by_rows {by_rows!r}. Answer a frozenset of indices of parameters of that segment"
    size = arrangement.shard_numel
    if arrangement.dim:
        return f"by_rows and dim {arrangement.dim} for one segment. Answer one of them"
    for index, offset in zip(arrangement.order, arrangement.offsets, strict=True):
        if index not in arrangement.by_rows:
            continue
        parameter = unit.parameters[index]
        row = parameter.row_numel
        if row is None:
            return f"'{parameter.name}' by rows, but its rows do not lie together in memory"
        if row and any((end - offset) % row for end in _cuts(offset, parameter.numel, size)):
            return (
                f"'{parameter.name}' by rows of {row} elements, but slices of {size} cut one of them: it begins at "
                f"{offset}"
            )
    return ""


def _cuts(offset: int, numel: int, size: int) -> Sequence[int]:
    """The first two ends of slices inside of a parameter: the others lie at equal distances."""
    first = (offset // size + 1) * size if size else numel
    return range(first, offset + numel, size)[:2] if size else ()


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """``stride`` where the elements fill a range without gaps or overlaps (channels_last, say), else contiguous."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if step != expected:
            return contiguous_stride(shape)
        expected *= size
    return tuple(stride)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def product(sizes: Sequence[int]) -> int:
    return math.prod(sizes)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
