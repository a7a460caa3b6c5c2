"""Buffers of several segments, against an enumeration of their elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.interfaces import Arrangement, ParameterGeometry, UnitGeometry
from polyshard.planning.layout import FlatLayout, laid_out

#: Of each segment: the sizes of its parameters, the elements between two of them, and those that slices have beyond.
SEGMENTS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 1), st.integers(0, 3)),
    min_size=1,
    max_size=4,
)
WORLD_SIZES = st.integers(1, 5)


def planned(segments: Sequence[tuple[list[int], int, int]], world_size: int) -> FlatLayout:
    """Elements of 8 bytes, so that each parameter begins at a multiple of 2."""
    sizes = [numel for numels, _, _ in segments for numel in numels]
    parameters = tuple(
        ParameterGeometry(str(index), (numel,), (1,), torch.float64, True) for index, numel in enumerate(sizes)
    )
    arrangements, first = [], 0
    for numels, apart, more in segments:
        offsets, cursor = [], 0
        for numel in numels:
            offsets.append(cursor)
            cursor += numel + numel % 2 + 2 * apart
        order = tuple(range(first, first + len(numels)))
        size = max(1, -(-(offsets[-1] + numels[-1]) // world_size)) + more
        arrangements.append(Arrangement(order, tuple(offsets), size, exact=True))
        first += len(numels)
    return laid_out(UnitGeometry("unit", parameters, world_size, 8), arrangements)[1]


def shards(layout: FlatLayout) -> list[list[tuple[int, int] | None]]:
    """For every element of every rank's shard: (parameter, element within it), or None for padding."""
    whole: list[tuple[int, int] | None] = [None] * layout.padded_numel
    for index, slot in enumerate(layout.slots):
        for element in range(slot.numel):
            assert whole[slot.offset + element] is None, "two parameters share an element"
            whole[slot.offset + element] = (index, element)
    found: list[list[tuple[int, int] | None]] = [[] for _ in range(layout.world_size)]
    begin = 0
    starts = [*(each.start for each in layout.segments), layout.shard_numel]
    for size, start, end in zip(layout.slices, starts, starts[1:] or [layout.shard_numel], strict=False):
        for rank, shard in enumerate(found):
            shard += whole[begin + rank * size : begin + (rank + 1) * size]
            shard += [None] * (end - start - size if layout.segments else 0)
        begin += layout.world_size * (end - start)
    return found


@given(SEGMENTS, WORLD_SIZES)
def test_pieces_and_ranges_are_those_found_element_by_element(
    segments: list[tuple[list[int], int, int]], world_size: int
) -> None:
    layout = planned(segments, world_size)
    seen = [0] * len(layout.slots)
    for rank, shard in enumerate(shards(layout)):
        assert len(shard) == layout.shard_numel
        held = {place: owner for place, owner in enumerate(shard) if owner is not None}
        told = {
            piece.shard_offset + step: (piece.slot, piece.start + step)
            for piece in layout.pieces(rank)
            for step in range(piece.numel)
        }
        assert told == held
        for index in range(len(layout.slots)):
            mine = [element for slot, element in held.values() if slot == index]
            assert layout.range_of(index, rank) == ((mine[0], mine[-1] + 1) if mine else (0, 0))
            seen[index] += len(mine)
    assert seen == [slot.numel for slot in layout.slots]


@given(SEGMENTS, WORLD_SIZES)
def test_gaps_and_pads_are_what_belongs_to_nothing(segments: list[tuple[list[int], int, int]], world_size: int) -> None:
    layout = planned(segments, world_size)
    taken = {place for slot in layout.slots for place in range(slot.offset, slot.end)}
    gaps = [place for offset, numel in layout.gaps() for place in range(offset, offset + numel)]
    assert gaps == sorted(set(range(layout.padded_numel)) - taken)
    sliced = {place for each in layout.segments for place in range(each.start, each.start + each.numel)}
    pads = [place for offset, numel in layout.pads() for place in range(offset, offset + numel)]
    assert pads == (sorted(set(range(layout.shard_numel)) - sliced) if layout.segments else [])


@given(SEGMENTS, WORLD_SIZES)
def test_segments_and_parameters_are_aligned_and_little_is_lost(
    segments: list[tuple[list[int], int, int]], world_size: int
) -> None:
    layout = planned(segments, world_size)
    assert not any(slot.offset % 2 for slot in layout.slots)
    assert not any(each.start % 2 for each in layout.segments)
    # One of them at most to each alignment, and none behind the last.
    assert layout.shard_numel - sum(layout.slices) <= (len(layout.segments) - 1 if layout.segments else 0)
    assert layout.padded_numel == world_size * layout.shard_numel >= layout.numel


def test_one_segment_and_one_rank_cut_a_buffer_as_a_whole() -> None:
    one = ([3, 4], 0, 0)
    assert planned([one], 2).segments == ()
    assert planned([one, one], 1).segments == ()
    assert planned([one, one], 2).slices == (4, 4)


def test_a_staged_parameter_counts_its_elements_in_the_order_of_ranks() -> None:
    shape = (3, 8, 5)
    each = ParameterGeometry("weight", shape, (40, 5, 1), torch.float64, True)
    arrangement = Arrangement((0,), (0,), math.prod(shape) // 4, exact=True, dim=1)
    _, layout = laid_out(UnitGeometry("unit", (each,), 4, 8), [arrangement])
    assert layout.staged == (0,)
    assert [layout.range_of(0, rank) for rank in range(4)] == [(0, 30), (30, 60), (60, 90), (90, 120)]
    assert layout.slots[0].shown(30) == ((3, 2, 5), (10, 5, 1))
