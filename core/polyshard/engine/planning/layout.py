"""Where each parameter lies in a unit's flat buffer, and how ranks cut it. Pure arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

#: Each parameter starts at a multiple of this many bytes, so that kernels may use 16-byte accesses.
PARAMETER_ALIGNMENT_BYTES = 16
#: Shards of at least this many bytes are rounded up to ``SHARD_ALIGNMENT_BYTES`` ...
SHARD_ALIGNMENT_THRESHOLD_BYTES = 64 * 1024
#: ... because NCCL falls off its fast path on misaligned shards (world sizes 3, 5, 6, 7). Small shards gain nothing.
SHARD_ALIGNMENT_BYTES = 256


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

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.numel


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
            if slot.offset > cursor:
                found.append((cursor, slot.offset - cursor))
            cursor = slot.end
        if self.padded_numel > cursor:
            found.append((cursor, self.padded_numel - cursor))
        return tuple(found)


def plan_layout(
    shapes: Sequence[tuple[int, ...]],
    strides: Sequence[tuple[int, ...]],
    *,
    world_size: int,
    itemsize: int,
    parameter_alignment: int = PARAMETER_ALIGNMENT_BYTES,
    shard_alignment: int = SHARD_ALIGNMENT_BYTES,
) -> FlatLayout:
    """Lay parameters out one after the other and cut the buffer evenly.

    Args:
        shapes: Shape of each parameter.
        strides: Strides of each parameter; kept where they are dense, else made contiguous.
        world_size: Number of shards.
        itemsize: Bytes of an element of the buffer that travels.
        parameter_alignment: Bytes of which every parameter's start is a multiple; 1 lays them back to back.
        shard_alignment: Bytes to whose multiple large shards are rounded up; 1 for none.

    Every rank's shard has ``ceil(total / world_size)`` elements, as in PyTorch's FSDP, and large ones are rounded up
    to ``shard_alignment``.
    """
    alignment = max(1, parameter_alignment // itemsize)
    slots, cursor = [], 0
    for shape, stride in zip(shapes, strides, strict=True):
        numel = product(shape)
        offset = round_up(cursor, alignment)
        slots.append(Slot(offset, numel, tuple(shape), dense_stride(shape, stride)))
        cursor = offset + numel
    shard_numel = -(-cursor // world_size)
    if shard_numel * itemsize >= SHARD_ALIGNMENT_THRESHOLD_BYTES:
        shard_numel = round_up(shard_numel, max(1, shard_alignment // itemsize))
    return FlatLayout(tuple(slots), cursor, shard_numel, world_size)


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
