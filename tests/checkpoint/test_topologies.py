"""What ranks of any topology write, and ranks of any other read: without processes, over whatever hypothesis draws."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polyshard.checkpoint.writing import offered, share_out
from polyshard.inspect import ShardedParameter
from polyshard.io.boxes import Box, box_within
from polyshard.planning.layout import FlatLayout, rows_layout
from polyshard.planning.meshes import WorldMesh
from polyshard.planning.parts import TensorPart
from polyshard.state.sharded import MODEL, CheckpointTensor, of_parameter
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Shapes = dict[str, tuple[int, ...]]
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Topology:
    """One unit over ``shards`` ranks, times the ranks of a mesh of parts."""

    shards: int
    layout: str
    mesh: tuple[int, ...]
    placements: Mapping[str, tuple[Placement, ...]]
    """Of each parameter on ``mesh``; a plain one has none."""
    flat: bool
    """Whether an optimizer holds the unit's flat parameter."""

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        yield from itertools.product(*map(range, self.mesh))

    def laid_out(self, locals_: Values) -> FlatLayout:
        tensors = list(locals_.values())
        dims = [0] * len(tensors)
        if self.layout == "dims":
            # The last dimension that is divided evenly, of each.
            dims = [
                max((dim for dim, size in enumerate(each.shape) if size and size % self.shards == 0), default=0)
                for each in tensors
            ]
        return rows_layout(tensors, dims, shards=self.shards, itemsize=8)


shapes = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4
)


@st.composite
def topologies(draw: st.DrawFn, of: Shapes) -> Topology:
    mesh = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    placements = {}
    for name, shape in of.items():
        if mesh and draw(st.booleans()):
            each = st.one_of(st.just(Replicate()), *(st.just(Shard(dim)) for dim in range(len(shape))))
            placements[name] = tuple(draw(each) for _ in mesh)
    layout = draw(st.sampled_from(["rows", "dims"]))
    return Topology(draw(st.integers(1, 5)), layout, mesh, placements, draw(st.booleans()))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shapes, Topology, Topology]:
    of = draw(shapes)
    return of, draw(topologies(of)), draw(topologies(of))


def chunked(whole: torch.Tensor, dim: int, number: int, index: int) -> tuple[torch.Tensor, int]:
    """As torch cuts, with the first row; nothing at the end where it gives fewer chunks."""
    parts = whole.chunk(number, dim) if whole.shape[dim] else ()
    if index < len(parts):
        return parts[index], sum(part.shape[dim] for part in parts[:index])
    return whole.narrow(dim, whole.shape[dim], 0), whole.shape[dim]


def held_by(topology: Topology, wholes: Values, coordinate: tuple[int, ...]) -> Iterator[dict[str, CheckpointTensor]]:
    """The state dict of each rank of one shard group, over memory that has the elements of ``wholes``."""
    locals_: Values = {}
    parts: dict[str, TensorPart | None] = {}
    for name, whole in wholes.items():
        placements = topology.placements.get(name)
        offset = [0] * whole.ndim
        for number, index, each in zip(topology.mesh, coordinate, placements or (), strict=False):
            if isinstance(each, Shard):
                whole, first = chunked(whole, each.dim, number, index)
                offset[each.dim] += first
        locals_[name] = whole.contiguous()
        mesh: Any = WorldMesh.pretended({str(index): size for index, size in enumerate(topology.mesh)})
        shape = tuple(wholes[name].shape)
        parts[name] = placements and TensorPart(mesh, placements, shape, (), tuple(offset), tuple(whole.shape))
    layout = topology.laid_out(locals_)
    for rank in range(topology.shards):
        shard = torch.full((layout.shard_numel,), -1, dtype=torch.int64)
        pieces = {piece.slot: piece for piece in layout.pieces(rank)}
        found = {}
        for slot, name in enumerate(locals_):
            where, piece, local = layout.slots[slot], pieces.get(slot), locals_[name]
            own = local.new_empty(0)
            if piece is not None:
                own = shard.narrow(0, piece.shard_offset, piece.numel)
                elements = local.chunk(topology.shards, where.dim)[rank] if where.dim else local
                own.copy_(elements.flatten() if where.dim else elements.flatten()[piece.start : piece.stop])
            sharded, part, box = topology.shards > 1, parts[name], None
            own = own.view(where.shown(own.numel())[0] if sharded else where.shape)
            if piece is not None:
                first = chunked(local, where.dim, topology.shards, rank)[1] if sharded and local.ndim else 0
                start = tuple(first if dim == where.dim else 0 for dim in range(local.ndim))
                box = Box(start, tuple(own.shape)[: local.ndim]).moved(part.offset if part else (0,) * local.ndim)
            at, shape = 0 if piece is None else piece.shard_offset, tuple(wholes[name].shape)
            like = nn.Parameter(own.detach(), requires_grad=False)
            parameter = ShardedParameter(like, like, (name,), shape, box, sharded, part, where, at)
            found[name] = of_parameter(parameter, parameter.within_shard(shard) if topology.flat else own)
        yield found


def goes_through(case: tuple[Shapes, Topology, Topology]) -> None:
    of, one, other = case
    wholes = {name: torch.arange(math.prod(shape)).view(shape) for name, shape in of.items()}
    ranks = [each for place in one.coordinates() for each in held_by(one, wholes, place)]
    offers = [offered({MODEL: each}) for each in ranks]
    shares = share_out([offer for offer, _ in offers], complete=True)
    written: dict[str, list[tuple[Box, torch.Tensor]]] = {name: [] for name in of}
    for share, (offer, chunks) in zip(shares.of_ranks, offers, strict=True):
        for row in share.tolist():
            chunk, name = chunks[row], offer.kinds[offer.rows[row, 0]][0][1]
            written[name].append((chunk.box, chunk.view.clone()))
    for name, whole in wholes.items():
        # Each element once, and at its place.
        assert sum(box.numel for box, _ in written[name]) == whole.numel()
        for box, value in written[name]:
            assert torch.equal(value, box_within(whole, Box.whole(whole.shape), box))
    blank = {name: torch.full(shape, -2) for name, shape in of.items()}
    got = {name: torch.full(shape, -3) for name, shape in of.items()}
    for place in other.coordinates():
        for state in held_by(other, blank, place):
            for name, target in state.items():
                for chunk in target.chunks:
                    for box, value in written[name]:
                        if (common := box.overlap(chunk.box)) is not None:
                            box_within(chunk.view, chunk.box, common).copy_(box_within(value, box, common))
                    assert torch.equal(chunk.view, box_within(wholes[name], Box.whole(of[name]), chunk.box))
                    box_within(got[name], Box.whole(of[name]), chunk.box).copy_(chunk.view)
    for name, whole in wholes.items():
        assert torch.equal(got[name], whole)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(pairs())
def test_any_topology_reads_what_any_other_wrote(case: tuple[Shapes, Topology, Topology]) -> None:
    goes_through(case)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tenth", range(10))
@settings(deadline=None, max_examples=10_000, suppress_health_check=[HealthCheck.too_slow])
@given(case=pairs())
def test_a_hundred_thousand_pairs_of_topologies(tenth: int, case: tuple[Shapes, Topology, Topology]) -> None:
    goes_through(case)
