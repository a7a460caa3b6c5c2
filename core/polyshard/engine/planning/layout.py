"""Where each parameter lies in a unit's flat buffer, and how ranks cut it. Pure arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from ...interfaces import Arrangement, ParameterGeometry


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

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.numel

    def shown(self, numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a piece of so many elements: ``(rows, ...)`` where it is whole rows, else 1-D."""
        if not self.by_rows:
            return (numel,), (1,)
        row = product(self.shape[1:])
        return (numel // row if row else 0, *self.shape[1:]), self.stride


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one rank's shard."""

    slot: int
    """Index of the parameter."""
    start: int
    """First element within the parameter, in storage order."""
    stop: int
    """One past the last element within the parameter."""
    shard_offset: int
    """Where the part starts within the rank's shard, in elements."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """A unit's flat buffer of ``world_size`` equal shards.

    Invariants: slots are in order and do not overlap; every slot ends at or before ``numel``;
    ``numel <= padded_numel == world_size * shard_numel``.
    """

    slots: tuple[Slot, ...]
    numel: int
    """Elements up to the end of the last parameter, gaps for alignment included."""
    shard_numel: int
    world_size: int

    @property
    def padded_numel(self) -> int:
        """Elements of the whole buffer, padding at the end included."""
        return self.shard_numel * self.world_size

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The non-empty parts of parameters in ``rank``'s shard, in order.

        Raises:
            IndexError: ``rank`` is not in ``range(world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not in range({self.world_size})")
        begin = rank * self.shard_numel
        return self.pieces_in(begin, begin + self.shard_numel - 1)

    def range_of(self, slot: int, rank: int) -> tuple[int, int]:
        """First and one past the last element of parameter ``slot`` in ``rank``'s shard; ``(0, 0)`` for none."""
        offset, end = self.slots[slot].offset, self.slots[slot].end
        begin = rank * self.shard_numel
        low, high = max(offset, begin), min(end, begin + self.shard_numel)
        return (low - offset, high - offset) if low < high else (0, 0)

    def pieces_in(self, start: int, end: int) -> tuple[Piece, ...]:
        """The non-empty parts of parameters in elements ``start`` to ``end`` (inclusive) of the whole buffer."""
        first = bisect.bisect_right(self.slots, start, key=lambda slot: slot.end)
        found = []
        for index in range(first, len(self.slots)):
            slot = self.slots[index]
            low, high = max(slot.offset, start), min(slot.end, end + 1)
            if slot.offset > end:
                break
            if low < high:
                found.append(Piece(index, low - slot.offset, high - slot.offset, low - start))
        return tuple(found)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(offset, numel)`` of every range that belongs to no parameter."""
        found, cursor = [], 0
        for slot in self.slots:
            if not slot.numel:
                # One may lie inside of a gap, which is one all the same.
                continue
            if slot.offset > cursor:
                found.append((cursor, slot.offset - cursor))
            cursor = slot.end
        if self.padded_numel > cursor:
            found.append((cursor, self.padded_numel - cursor))
        return tuple(found)


def laid_out(parameters: Sequence[ParameterGeometry], arrangement: Arrangement, shards: int) -> FlatLayout:
    """The buffer of ``arrangement``, whose indices are those of ``parameters``, in so many equal ``shards``."""
    slots = []
    for index, offset in zip(arrangement.order, arrangement.offsets, strict=True):
        each = parameters[index]
        slots.append(Slot(offset, each.numel, each.shape, each.stride, index in arrangement.by_rows))
    return FlatLayout(tuple(slots), slots[-1].end, arrangement.shard_numel, shards)


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
    """Product of ``sizes``; 1 where there are none."""
    result = 1
    for size in sizes:
        result *= size
    return result


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple
