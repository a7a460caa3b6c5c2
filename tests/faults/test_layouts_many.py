"""A hundred thousand units by every layout: each element lies in one rank's slice, once, and comes back from there."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from fault_figures import record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polyshard.interfaces import Layout, ParameterGeometry, PluginContext, UnitGeometry
from polyshard.planning.layout import laid_out
from polyshard_layouts.layouts import Blocks, Flat, Rows

EXAMPLES = 100_000
CONTEXT = PluginContext("under test", torch.device("cpu"))
LAYOUTS: tuple[Layout, ...] = (Flat(CONTEXT), Rows(CONTEXT), Blocks(CONTEXT, size=4), Blocks(CONTEXT, size=15))
SHAPES = st.lists(st.one_of(st.integers(0, 6), st.integers(1, 40)), min_size=1, max_size=3).map(tuple)


def check(shapes: list[tuple[int, ...]], shards: int, layout: Layout, itemsize: int) -> None:
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    parameters = []
    for index, shape in enumerate(shapes):
        stride = tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))
        parameters.append(ParameterGeometry(f"p{index}", shape, stride, dtype, True))
    unit = UnitGeometry("unit", tuple(parameters), shards, itemsize)
    # Numbers that come once each, by parameter; what no rank writes stays 0.
    ends = np.cumsum([0, *(each.numel for each in parameters)])
    whole = [np.arange(start + 1, stop + 1) for start, stop in itertools.pairwise(ends)]
    back = [np.zeros_like(each) for each in whole]
    seen = np.zeros(int(ends[-1]) + 1, dtype=np.int64)
    order, planned = laid_out(unit, layout.arrange(unit))
    for rank in range(shards):
        shard = np.zeros(planned.shard_numel, dtype=np.int64)
        for piece in planned.pieces(rank):
            source = whole[order[piece.slot]]
            assert not shard[piece.shard_offset : piece.shard_offset + piece.numel].any()
            shard[piece.shard_offset : piece.shard_offset + piece.numel] = source[piece.start : piece.stop]
        seen += np.bincount(shard, minlength=len(seen))
        for piece in planned.pieces(rank):
            target = back[order[piece.slot]]
            target[piece.start : piece.stop] = shard[piece.shard_offset : piece.shard_offset + piece.numel]
    assert (seen[1:] == 1).all()
    assert all((one == other).all() for one, other in zip(whole, back, strict=True))


CASES = {
    "shapes": st.lists(SHAPES, min_size=1, max_size=6),
    "shards": st.integers(1, 17),
    "layout": st.sampled_from(LAYOUTS),
    "itemsize": st.sampled_from([2, 4, 8]),
}


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_elements_of_many_units_lie_in_one_slice_each() -> None:
    count = 0

    @given(**CASES)
    @settings(
        deadline=None,
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def examples(shapes: list[tuple[int, ...]], shards: int, layout: Layout, itemsize: int) -> None:
        nonlocal count
        count += 1
        check(shapes, shards, layout, itemsize)

    examples()
    assert count >= EXAMPLES
    record("layouts", examples=count)
