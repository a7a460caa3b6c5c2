"""Ranges of a tensor's elements as boxes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyshard.io.boxes import Box, inverse, range_boxes, storage_order

#: No deadline: a busy machine is no wrong answer.
relaxed = settings(deadline=None, max_examples=60)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


@st.composite
def shape_and_range(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Indices, in element order, of what ``box`` covers: numbered by torch."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        numbers = numbers.narrow(dim, offset, size)
    return numbers.flatten().tolist()


@relaxed
@given(shape_and_range())
def test_boxes_cover_the_range_once_and_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    covered = [element for box in range_boxes(shape, start, stop) for element in elements(box, shape)]
    assert covered == list(range(start, stop))


@relaxed
@given(shape_and_range())
def test_boxes_are_few_and_not_empty(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = range_boxes(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    assert all(box.numel > 0 for box in boxes)


@relaxed
@given(shapes)
def test_a_whole_tensor_is_one_box(shape: tuple[int, ...]) -> None:
    assert range_boxes(shape, 0, math.prod(shape)) == [Box((0,) * len(shape), shape)]


def test_a_range_that_starts_and_ends_inside_rows() -> None:
    # 4 rows of 6: the end of row 0, rows 1 and 2 whole, the start of row 3.
    assert range_boxes((4, 6), 4, 21) == [Box((0, 4), (1, 2)), Box((1, 0), (2, 6)), Box((3, 0), (1, 3))]


def test_a_range_within_one_row_and_an_empty_one() -> None:
    assert range_boxes((4, 6), 13, 16) == [Box((2, 1), (1, 3))]
    assert range_boxes((4, 6), 7, 7) == []
    assert range_boxes((), 0, 1) == [Box((), ())]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 25)])
def test_a_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=f"elements {start} to {stop} do not lie within a tensor of 24"):
        range_boxes((4, 6), start, stop)


@relaxed
@given(shapes, st.randoms(use_true_random=False))
def test_storage_order_makes_any_dense_tensor_row_major(shape: tuple[int, ...], random: object) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)  # type: ignore[attr-defined]
    tensor = torch.arange(math.prod(shape)).reshape(shape).permute(dims)
    order = storage_order(tensor.shape, tensor.stride())
    assert tensor.permute(order).flatten().tolist() == list(range(math.prod(shape)))
    assert tensor.permute(order).permute(inverse(order)).shape == tensor.shape


@relaxed
@given(shape_and_range())
def test_a_box_moves_with_permuted_dimensions(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    dims = tuple(reversed(range(len(shape))))
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for box in range_boxes(shape, start, stop):
        moved = box.permuted(dims)
        part = numbers.permute(dims)
        for dim, (offset, size) in enumerate(zip(moved.offsets, moved.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert sorted(part.flatten().tolist()) == elements(box, shape)
