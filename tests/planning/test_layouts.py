"""The places of parameters in flat buffers, against an enumeration of their elements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.planning.layout import FlatLayout, Piece, Slot, dense_stride, rows_layout
from polyshard_fsdp._flat_param import flat_layout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5)
SHARDS = st.integers(1, 6)
ITEM_SIZES = st.sampled_from([1, 2, 4, 8, 16])
#: What is given strides and shapes alone.
Owner = tuple[int, int] | None


def by_rows(shapes: list[tuple[int, ...]], shards: int, itemsize: int) -> FlatLayout:
    """Natively: each along its last dimension that is divided evenly."""
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    dims = [max((dim for dim, n in enumerate(shape) if n and n % shards == 0), default=0) for shape in shapes]
    dims = [dim if math.prod(shape) else 0 for dim, shape in zip(dims, shapes, strict=True)]
    return rows_layout(parameters, dims, shards=shards, itemsize=itemsize)


def anywhere(shapes: list[tuple[int, ...]], shards: int, itemsize: int) -> FlatLayout:
    """Of FSDP1."""
    parameters: list[Any] = [torch.empty(shape, device="meta") for shape in shapes]
    return flat_layout(parameters, shards=shards, itemsize=itemsize, aligned=True)


LAYOUTS = pytest.mark.parametrize("laid_out", [by_rows, anywhere])


def owners(layout: FlatLayout) -> list[Owner]:
    """For every element of the buffer: (parameter, element within it), or None for padding."""
    whole: list[Owner] = [None] * layout.padded_numel
    for index, slot in enumerate(layout.slots):
        for element in range(slot.numel):
            assert whole[slot.offset + element] is None, "two parameters share an element"
            whole[slot.offset + element] = (index, element)
    return whole


def shards_of(layout: FlatLayout) -> list[list[Owner]]:
    """The same for every rank's shard."""
    whole, found = owners(layout), [list[Owner]() for _ in range(layout.world_size)]
    starts = [*layout.starts, layout.shard_numel]
    for size, start, end in zip(layout.slices, starts, starts[1:], strict=False):
        begin = layout.world_size * start
        for rank, shard in enumerate(found):
            shard += whole[begin + rank * size : begin + (rank + 1) * size] + [None] * (end - start - size)
    return found


@pytest.mark.slow
@LAYOUTS
@given(shapes=SHAPES, shards=SHARDS, itemsize=ITEM_SIZES)
def test_pieces_ranges_gaps_and_pads_are_those_found_element_by_element(
    laid_out: Any, shapes: list[tuple[int, ...]], shards: int, itemsize: int
) -> None:
    layout = laid_out(shapes, shards, itemsize)
    seen = [0] * len(layout.slots)
    for rank, shard in enumerate(shards_of(layout)):
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
    assert seen == [slot.numel for slot in layout.slots] == [math.prod(shape) for shape in shapes]
    gaps = [place for offset, numel in layout.gaps() for place in range(offset, offset + numel)]
    assert gaps == [place for place, owner in enumerate(owners(layout)) if owner is None]
    sliced = {start + step for start, size in zip(layout.starts, layout.slices, strict=True) for step in range(size)}
    pads = [place for offset, numel in layout.pads() for place in range(offset, offset + numel)]
    assert pads == sorted(set(range(layout.shard_numel)) - sliced)


@LAYOUTS
@given(shapes=SHAPES, shards=SHARDS, itemsize=ITEM_SIZES)
def test_parameters_are_aligned_and_little_is_lost(
    laid_out: Any, shapes: list[tuple[int, ...]], shards: int, itemsize: int
) -> None:
    layout = laid_out(shapes, shards, itemsize)
    assert not any(slot.offset * itemsize % 16 for slot in layout.slots)
    assert not any(start * itemsize % 16 for start in layout.starts)
    # Less than 16 bytes to each alignment, and none behind the last.
    assert (layout.shard_numel - sum(layout.slices)) * itemsize <= 15 * (len(layout.slices) - 1)
    assert layout.padded_numel == shards * layout.shard_numel >= layout.numel == layout.slots[-1].end


def test_slices_are_ceil_of_rows_and_large_ones_begin_at_256_bytes() -> None:
    # float32: 64 KiB are 16384 elements, and 256 bytes are 64. Rows of 4: ceil(7 / 2) * 4, then ceil(5 / 2).
    shapes = [(7, 4), (5,), (2 * 16384,), (2 * 16383,)]
    parameters = [torch.empty(shape, device="meta") for shape in shapes]
    layout = rows_layout(parameters, [0] * 4, shards=2, itemsize=4)
    assert layout.slices == (16, 3, 16384, 16383)
    assert layout.starts == (0, 16, 64, 64 + 16384)


def test_one_segment_and_one_rank_cut_a_buffer_as_a_whole() -> None:
    one = torch.empty(4, 6, device="meta")
    assert rows_layout([one], [0], shards=3, itemsize=4).segments == ()
    assert rows_layout([one, one], [1, 1], shards=1, itemsize=4).segments == ()
    assert rows_layout([one, one], [1, 1], shards=1, itemsize=4).staged == ()
    assert rows_layout([one, one], [0, 1], shards=3, itemsize=4).slices == (12, 8)


def test_a_staged_parameter_counts_its_elements_in_the_order_of_ranks() -> None:
    layout = rows_layout([torch.empty(3, 8, 5, device="meta")], [1], shards=4, itemsize=8)
    assert layout.staged == (0,)
    assert [layout.range_of(0, rank) for rank in range(4)] == [(0, 30), (30, 60), (60, 90), (90, 120)]
    assert layout.slots[0].shown(30) == ((3, 2, 5), (10, 5, 1))


def test_pieces_of_fsdp1_are_cut_by_ceil_wherever_that_is() -> None:
    layout = anywhere([(3,), (0, 4), (2, 3)], 2, 4)
    # The third begins behind 16 bytes: ceil((4 + 6) / 2) = 5.
    assert layout.shard_numel == 5
    assert layout.pieces(0) == (Piece(0, 0, 3, 0), Piece(2, 0, 1, 4))
    assert layout.pieces(1) == (Piece(2, 1, 6, 0),)
    assert layout.slots[2].shown(5) == ((5,), (1,))


def test_a_rank_outside_the_world_is_refused() -> None:
    for rank in (2, -1):
        with pytest.raises(IndexError, match=rf"rank {rank} is not in range\(2\)"):
            by_rows([(6,)], 2, 4).pieces(rank)


def test_channels_last_is_kept_and_what_has_holes_becomes_contiguous() -> None:
    image = torch.empty(6, 4, 3, 3, device="meta").to(memory_format=torch.channels_last)
    assert dense_stride((6, 4, 3, 3), image.stride()) == (36, 1, 12, 4)
    with_holes = torch.empty(6, 8, device="meta")[:, ::2]
    assert dense_stride((6, 4), with_holes.stride()) == (4, 1)
    expanded = torch.empty(1, 4, device="meta").expand(6, 4)
    assert dense_stride((6, 4), expanded.stride()) == (4, 1)
    # Rows of a transposed matrix do not lie together.
    assert rows_layout([torch.empty(4, 6).t()], [0], shards=2, itemsize=4).slots[0].stride == (4, 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.lists(st.integers(0, 12), min_size=3, max_size=3))
def test_any_stride_becomes_one_that_reaches_every_element_of_the_range_once(
    sizes: list[int], steps: list[int]
) -> None:
    stride = dense_stride(tuple(sizes), tuple(steps[: len(sizes)]))
    tensor = torch.arange(math.prod(sizes)).as_strided(sizes, stride)
    assert sorted(tensor.flatten().tolist()) == list(range(math.prod(sizes)))


def test_an_empty_parameter_does_not_divide_a_gap() -> None:
    slots = (Slot(0, 2, (2,), (1,)), Slot(8, 0, (0,), (1,)), Slot(16, 2, (2,), (1,)))
    assert FlatLayout(slots, 18, 10, 2).gaps() == ((2, 14), (18, 2))
