"""What ``rows`` and ``blocks`` never cut, how much padding they leave at most, and that they end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyshard.interfaces import Arrangement, ParameterGeometry, PluginContext, UnitGeometry
from polyshard_layouts.layouts import Blocks, Flat, Rows

CONTEXT = PluginContext("under test", torch.device("cpu"))
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64, 16: torch.complex128}
#: Small sizes, sizes of layers, and primes.
SIZES = st.one_of(st.integers(0, 9), st.sampled_from([16, 64, 97, 256, 768, 1009, 1024, 4093]), st.integers(1, 5000))


@st.composite
def units(draw: st.DrawFn) -> UnitGeometry:
    itemsize = draw(st.sampled_from(list(DTYPES)))
    parameters = []
    for index in range(draw(st.integers(1, 12))):
        shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=2)))
        if len(shape) == 2 and draw(st.integers(0, 4)) == 0:
            # Of its transpose, which is row-major.
            parameters.append(ParameterGeometry(f"p{index}", shape, (1, max(1, shape[0])), DTYPES[itemsize], True))
            continue
        stride = tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        parameters.append(ParameterGeometry(f"p{index}", shape, stride, DTYPES[itemsize], True))
    shards = draw(st.one_of(st.integers(1, 4096), st.sampled_from([1, 2, 3, 8, 64, 1024, 4096])))
    return UnitGeometry("unit", tuple(parameters), shards, itemsize)


def owners(unit: UnitGeometry, arrangements: Sequence[Arrangement]) -> list[list[tuple[int, int]]]:
    """For each parameter, the pieces of it: element ranges, one for each slice that has any, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for each in arrangements:
        for index, offset in zip(each.order, each.offsets, strict=True):
            numel, size = unit.parameters[index].numel, each.shard_numel
            pieces = []
            for rank in range(offset // size if size else 0, unit.shards):
                start, stop = max(rank * size, offset), min((rank + 1) * size, offset + numel)
                if start >= offset + numel:
                    break
                if start < stop:
                    pieces.append((start - offset, stop - offset))
            assert index not in found
            found[index] = pieces
    return [found[index] for index in range(len(unit.parameters))]


def longest(unit: UnitGeometry, grains: Sequence[int]) -> float:
    """A slice that is never exceeded.

    A slice as long as the longest parameter can be cut in by any but one place, and to put it there costs a grain, and
    as much again to align it: ``unit.shards`` such slices serve that hold all this. The search tries sizes a few per
    cent apart.
    """
    align = unit.alignment
    moved = sum(align + (grain + math.lcm(grain, align) if grain > 1 else 0) for grain in grains)
    total = sum(each.numel for each in unit.parameters)
    needed = max(max(each.numel for each in unit.parameters), -(-(total + moved) // unit.shards), 1)
    return 1.05 * (needed + align) + unit.slice_alignment(2 * needed + 1 << 20) + 1


def slices(arrangements: Sequence[Arrangement]) -> int:
    return sum(each.shard_numel for each in arrangements)


def check(unit: UnitGeometry, arrangements: Sequence[Arrangement], grains: Sequence[int]) -> None:
    """Every element lies somewhere once, and every cut is a whole number of grains from the parameter's start."""
    for each, pieces, grain in zip(unit.parameters, owners(unit, arrangements), grains, strict=True):
        cuts = [start for start, _ in pieces] + [each.numel]
        assert [stop for _, stop in pieces] == (cuts[1:] if each.numel else [])
        assert not each.numel or cuts[0] == 0
        assert not any(cut % grain for cut in cuts[:-1])
    assert slices(arrangements) <= longest(unit, grains)


@pytest.mark.slow
@given(units())
@settings(deadline=None)
def test_no_row_is_cut(unit: UnitGeometry) -> None:
    arrangements = Rows(CONTEXT).arrange(unit)
    rows = [each.row_numel for each in unit.parameters]
    check(unit, arrangements, [row or 1 for row in rows])
    shown = frozenset().union(*(each.by_rows for each in arrangements))
    assert shown == {index for index, row in enumerate(rows) if row is not None}


@pytest.mark.slow
@given(units(), st.sampled_from([2, 32, 48, 256, 1000]), st.sampled_from([0, 100, 4096]))
@settings(deadline=None)
def test_no_block_is_cut(unit: UnitGeometry, size: int, smallest: int) -> None:
    arrangements = Blocks(CONTEXT, size=size, smallest=smallest).arrange(unit)
    check(unit, arrangements, [size if each.numel >= max(1, smallest) else 1 for each in unit.parameters])
    assert not any(each.by_rows for each in arrangements)


@pytest.mark.slow
@given(units(), st.sampled_from([(1, 1), (2, 2), (32, 32), (5, 1000)]), st.sampled_from([0, 4096]))
@settings(deadline=None)
def test_no_tile_is_cut(unit: UnitGeometry, size: tuple[int, int], smallest: int) -> None:
    arrangements = Blocks(CONTEXT, size=list(size), smallest=smallest).arrange(unit)
    ruled = [
        len(each.shape) == 2 and each.row_numel is not None and each.numel >= max(1, smallest)
        for each in unit.parameters
    ]
    rows = [size[0] * (each.row_numel or 1) if rules else 1 for each, rules in zip(unit.parameters, ruled, strict=True)]
    check(unit, arrangements, rows)
    assert frozenset().union(*(each.by_rows for each in arrangements)) == {i for i, rules in enumerate(ruled) if rules}


@pytest.mark.slow
@given(units())
@settings(deadline=None)
def test_flat_leaves_what_alignment_asks_for_alone(unit: UnitGeometry) -> None:
    arrangements = Flat(CONTEXT).arrange(unit)
    check(unit, arrangements, [1] * len(unit.parameters))
    total = sum(each.numel for each in unit.parameters)
    least = -(-(total + unit.alignment * len(unit.parameters)) // unit.shards)
    assert slices(arrangements) <= unit.aligned_slice(least)


@pytest.mark.slow
@given(units())
@settings(deadline=None)
def test_blocks_of_one_element_and_vectors_by_rows_lie_as_close_as_flat(unit: UnitGeometry) -> None:
    (one,) = Flat(CONTEXT).arrange(unit)
    found = Blocks(CONTEXT, size=1, smallest=0).arrange(unit)
    total = sum(each.numel for each in unit.parameters)
    assert slices(found) <= max(one.shard_numel, 1) * 1.03 + unit.alignment or total == 0


#: Rows and numbers of ranks, and elements of padding that no layout by rows could go below, on equal slices.
WORST: dict[str, tuple[tuple[tuple[int, ...], ...], int, int]] = {
    "a row longer than a share": (((2, 1000), (100,)), 64, 64 * 1000 - 2100),
    "primes": (((1009, 1009),), 1024, 0),
}


@pytest.mark.parametrize(("shapes", "shards", "least"), WORST.values(), ids=WORST)
def test_where_rows_are_long_the_longest_decides(shapes: Any, shards: int, least: int) -> None:
    parameters = tuple(
        ParameterGeometry(str(index), shape, (*shape[1:], 1), torch.float32, True) for index, shape in enumerate(shapes)
    )
    unit = UnitGeometry("unit", parameters, shards, 4)
    found = Rows(CONTEXT).arrange(unit)
    padding = slices(found) * shards - sum(each.numel for each in parameters)
    assert least <= padding
    # One row, or two where a share is between: never more than a row too much for each rank.
    assert slices(found) <= unit.aligned_slice(max(shape[-1] for shape in shapes) * 1 + 64)
