"""What ranks write of any boxes, and read of any others: without processes, over whatever hypothesis draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polyshard.checkpoint.shares import share_out
from polyshard.checkpoint.writing import FileLayout, offered
from polyshard.io.boxes import Box, Chunk, box_within
from polyshard.state.sharded import MODEL, CheckpointTensor

#: Of a tensor: its shape, the boxes in which ranks hold it, each with these ranks, and the boxes that are read.
Case = tuple[tuple[int, ...], list[tuple[Box, set[int]]], list[Box]]
RANKS = 5


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that have each element of ``shape`` once."""
    edges = []
    for size in shape:
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else ()
        edges.append([*itertools.pairwise([0, *sorted(cuts), size])])
    boxes = (Box(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in itertools.product(*edges))
    return [box for box in boxes if box.numel]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    holders = st.sets(st.integers(0, RANKS - 1), min_size=1)
    return shape, [(box, draw(holders)) for box in draw(grids(shape))], draw(grids(shape))


def goes_through(drawn: list[Case]) -> None:
    wholes = [torch.arange(math.prod(shape)).view(shape) for shape, *_ in drawn]
    offers = []
    for rank in range(RANKS):
        state = {}
        for number, (whole, (_, held, _)) in enumerate(zip(wholes, drawn, strict=True)):
            views = [(box, box_within(whole, Box.whole(whole.shape), box)) for box, ranks in held if rank in ranks]
            chunks = [Chunk(box, view) for box, view in views]
            state[str(number)] = CheckpointTensor(whole.shape, whole.dtype, whole.device, chunks)
        offers.append(offered({MODEL: state}))
    shares = share_out([offer for offer, _ in offers], complete=True)
    files = []
    for rank, (share, (offer, memory)) in enumerate(zip(shares.of_ranks, offers, strict=True)):
        layout = FileLayout()
        for row in share.tolist():
            stored = shares.stored[offer.kinds[offer.rows[row, 0]][0]]
            number = stored.boxes().index(memory[row].box)
            # As the first rank told in the manifest.
            assert (stored.files[number], stored.at[number]) == (rank, layout.add_tensor(memory[row].view))
        files.append(b"".join(layout.pieces()))
        assert sum(int((each.files == rank).sum()) for each in shares.stored.values()) == len(share)
        assert len(files[rank]) <= shares.ends[rank] < len(files[rank]) + 64
    for number, (whole, (_, _, read)) in enumerate(zip(wholes, drawn, strict=True)):
        stored = shares.stored[MODEL, str(number)]
        assert stored.is_whole
        for box in read:
            found = torch.full(box.sizes, -1)
            for index, common in stored.overlapping(box):
                inside, at = stored.box(index), int(stored.at[index])
                raw = bytearray(files[stored.files[index]][at : at + 8 * inside.numel])
                value = torch.frombuffer(raw, dtype=torch.int64).view(inside.sizes)
                box_within(found, box, common).copy_(box_within(value, inside, common))
            assert torch.equal(found, box_within(whole, Box.whole(whole.shape), box))


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(cases(), min_size=1, max_size=4))
def test_any_boxes_are_read_of_what_any_others_wrote(drawn: list[Case]) -> None:
    goes_through(drawn)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tenth", range(10))
@settings(deadline=None, max_examples=10_000, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=st.lists(cases(), min_size=1, max_size=4))
def test_a_hundred_thousand_sets_of_boxes(tenth: int, drawn: list[Case]) -> None:
    goes_through(drawn)
