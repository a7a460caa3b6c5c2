"""The places of parameters in a unit's flat buffer, and how ranks cut it. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..interfaces import PARAMETER_ALIGNMENT_BYTES, SLICE_ALIGNMENT_BYTES
from ..io.boxes import contiguous_stride as contiguous_stride

#: Bytes of a slice from which on it starts at a multiple of ``SLICE_ALIGNMENT_BYTES``.
_LARGE_SLICE_BYTES = 64 * 1024


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
    by_rows: bool = True
    """Whether it is cut between rows only. FSDP1 cuts anywhere, and its pieces are 1-D."""
    segment: int = 0
    """Index of the segment that it lies in."""
    dim: int = 0
    """The dimension along which it is cut evenly. Above 0 it is *staged*: ranks send and receive its pieces one after
    the other, and each is a block of the whole parameter instead of a range."""

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def shown(self, numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a piece of so many elements: ``(rows, ...)``, or 1-D where rows are cut.

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
        for index, slot in enumerate(self.slots):
            start, stop = self.range_of(index, rank)
            if start < stop:
                first, size = self._slice(slot)
                begin = self.world_size * first + rank * size
                found.append(Piece(index, start, stop, first + slot.offset + start - begin))
        return tuple(found)

    def _slice(self, slot: Slot) -> tuple[int, int]:
        """The first element in a rank's shard of the slice that has elements of ``slot``, and how many it has."""
        if not self.segments:
            return 0, self.shard_numel
        segment = self.segments[slot.segment]
        return segment.start, segment.numel

    def range_of(self, slot: int, rank: int) -> tuple[int, int]:
        """First and one past the last element of ``slot`` in ``rank``'s shard, as in ``Piece``; (0, 0) for none."""
        where = self.slots[slot]
        start, size = self._slice(where)
        begin = self.world_size * start + rank * size
        low, high = max(where.offset, begin), min(where.end, begin + size)
        return (low - where.offset, high - where.offset) if low < high else (0, 0)

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


def rows_layout(parameters: Sequence[torch.Tensor], dims: Sequence[int], *, shards: int, itemsize: int) -> FlatLayout:
    """The layout of ``parameters``, each in a segment of its own.

    Rank ``k`` holds rows ``[k * each, (k + 1) * each)``, ``each`` being the number of rows over that of ranks, rounded
    up: the local tensor of a ``DTensor`` with ``Shard(0)``.

    Args:
        parameters: At least one.
        dims: The dimension along which each is cut. The ranks divide evenly what is not 0.
        shards: Number of ranks.
        itemsize: Bytes of an element as it travels.
    """
    slots: list[Slot] = []
    segments: list[Segment] = []
    cursor = 0
    for number, (parameter, dim) in enumerate(zip(parameters, dims, strict=True)):
        shape = tuple(parameter.shape)
        numel = product(shape)
        # Of nothing, too, a slice has an element.
        size = numel // shards if dim else max(1, -(-(shape[0] if shape else 1) // shards) * product(shape[1:]))
        large = size * itemsize >= _LARGE_SLICE_BYTES
        start = round_up(cursor, max(1, (SLICE_ALIGNMENT_BYTES if large else PARAMETER_ALIGNMENT_BYTES) // itemsize))
        stride = row_stride(shape, parameter.stride())
        slots.append(Slot(start * shards, numel, shape, stride, segment=number, dim=dim if shards > 1 else 0))
        segments.append(Segment(start, size))
        cursor = start + size
    if shards == 1 or (len(segments) == 1 and not dims[0]):
        # Nothing is cut, or all alike.
        segments = []
        slots = [replace(slot, segment=0) for slot in slots]
    return FlatLayout(tuple(slots), slots[-1].end, cursor, shards, tuple(segments))


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


def row_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """``dense_stride`` where the elements of each index of dimension 0 lie together, else contiguous."""
    dense = dense_stride(shape, stride)
    row = product(shape[1:])
    apart = bool(shape) and shape[0] > 1 and row and dense[0] != row
    return contiguous_stride(shape) if apart else dense


def product(sizes: Sequence[int]) -> int:
    return math.prod(sizes)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
