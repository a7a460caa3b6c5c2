"""The arithmetic of flat layouts, against formulas that go element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.interfaces import ParameterGeometry, PluginContext, UnitGeometry
from polyshard.planning.layout import FlatLayout, Piece, Slot, dense_stride, laid_out
from polyshard_layouts.layouts import Flat

SHAPES = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)
WORLD_SIZES = st.integers(1, 9)
ITEM_SIZES = st.sampled_from([1, 2, 4, 8, 16])


def planned(shapes: Sequence[tuple[int, ...]], world_size: int, itemsize: int) -> FlatLayout:
    parameters = tuple(
        ParameterGeometry(str(index), shape, torch.empty(shape, device="meta").stride(), torch.float32, True)
        for index, shape in enumerate(shapes)
    )
    unit = UnitGeometry("unit", parameters, world_size, itemsize)
    return laid_out(unit, Flat(PluginContext("flat", torch.device("cpu"))).arrange(unit))[1]


def owners(layout: FlatLayout) -> list[tuple[int, int] | None]:
    """For every element of the buffer: (parameter, element within it), or None for padding."""
    table: list[tuple[int, int] | None] = [None] * layout.padded_numel
    for index, slot in enumerate(layout.slots):
        for element in range(slot.numel):
            assert table[slot.offset + element] is None, "two parameters share an element"
            table[slot.offset + element] = (index, element)
    return table


@pytest.mark.slow
@given(SHAPES, WORLD_SIZES, ITEM_SIZES)
def test_parameters_lie_aligned_in_order_and_apart(
    shapes: list[tuple[int, ...]], world_size: int, itemsize: int
) -> None:
    layout = planned(shapes, world_size, itemsize)
    end = 0
    for shape, slot in zip(shapes, layout.slots, strict=True):
        assert slot.offset * itemsize % 16 == 0
        assert slot.offset >= end
        # No more is left out than the alignment asks for.
        assert (slot.offset - end) * itemsize < 16
        assert slot.shape == shape
        assert slot.numel == math.prod(shape)
        end = slot.offset + slot.numel
    assert layout.numel == end


@pytest.mark.slow
@given(SHAPES, WORLD_SIZES, ITEM_SIZES, st.data())
def test_pieces_in_an_inclusive_range_are_those_found_element_by_element(
    shapes: list[tuple[int, ...]], world_size: int, itemsize: int, data: st.DataObject
) -> None:
    layout = planned(shapes, world_size, itemsize)
    table = owners(layout)
    if not table:
        assert layout.pieces_in(0, 0) == ()
        return
    start = data.draw(st.integers(0, len(table) - 1))
    end = data.draw(st.integers(start, len(table) - 1))
    expected: list[Piece] = []
    for place in range(start, end + 1):
        owner = table[place]
        if owner is None:
            continue
        index, element = owner
        if expected and expected[-1].slot == index:
            expected[-1] = Piece(index, expected[-1].start, element + 1, expected[-1].shard_offset)
        else:
            expected.append(Piece(index, element, element + 1, place - start))
    assert layout.pieces_in(start, end) == tuple(expected)


@given(st.integers(1, 200_000), st.integers(1, 16), ITEM_SIZES)
def test_small_shards_are_split_by_ceil_and_large_ones_rounded_to_256_bytes(
    numel: int, world_size: int, itemsize: int
) -> None:
    layout = planned([(numel,)], world_size, itemsize)
    even = math.ceil(numel / world_size)
    if even * itemsize < 65536:
        assert layout.shard_numel == even
    else:
        assert layout.shard_numel * itemsize % 256 == 0
        assert 0 <= (layout.shard_numel - even) * itemsize < 256
    assert layout.padded_numel == world_size * layout.shard_numel >= numel
    assert layout.numel == numel


@pytest.mark.parametrize(
    ("numel", "world_size", "expected"),
    [
        # float32: 64 KiB are 16384 elements, 256 bytes are 64.
        (3 * 16383, 3, 16383),
        (3 * 16383 + 1, 3, 16384),
        (3 * 16384 + 1, 3, 16448),
        (5 * 20000, 5, 20032),
    ],
)
def test_the_rounding_starts_at_64_kib_a_shard(numel: int, world_size: int, expected: int) -> None:
    assert planned([(numel,)], world_size, 4).shard_numel == expected


def test_fewer_elements_than_ranks_leave_the_last_ranks_empty() -> None:
    layout = planned([(2,)], 4, 4)
    assert layout.shard_numel == 1
    assert [len(layout.pieces(rank)) for rank in range(4)] == [1, 1, 0, 0]


def test_parameters_without_elements_take_no_room_and_are_no_rank_s() -> None:
    layout = planned([(3,), (0, 4), (2, 0), (5,)], 2, 4)
    assert [slot.numel for slot in layout.slots] == [3, 0, 0, 5]
    assert layout.numel == 4 + 5
    assert {piece.slot for rank in range(2) for piece in layout.pieces(rank)} == {0, 3}


def test_a_rank_outside_the_world_is_refused() -> None:
    layout = planned([(6,)], 2, 4)
    with pytest.raises(IndexError, match=r"rank 2 is not in range\(2\)"):
        layout.pieces(2)
    with pytest.raises(IndexError, match="rank -1"):
        layout.pieces(-1)


@pytest.mark.slow
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms())
def test_strides_of_permuted_tensors_are_kept(sizes: list[int], random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tensor = torch.empty(sizes, device="meta").permute(order)
    kept = dense_stride(tuple(tensor.shape), tensor.stride())
    assert kept == tensor.stride()


def test_channels_last_is_kept_and_what_has_holes_becomes_contiguous() -> None:
    image = torch.empty(6, 4, 3, 3, device="meta").to(memory_format=torch.channels_last)
    assert dense_stride((6, 4, 3, 3), image.stride()) == (36, 1, 12, 4)
    with_holes = torch.empty(6, 8, device="meta")[:, ::2]
    assert dense_stride((6, 4), with_holes.stride()) == (4, 1)
    expanded = torch.empty(1, 4, device="meta").expand(6, 4)
    assert dense_stride((6, 4), expanded.stride()) == (4, 1)


@pytest.mark.slow
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
