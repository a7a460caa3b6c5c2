"""Which part of a whole parameter this rank holds, and which the others do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...errors import UnsupportedError
from ..planning.layout import product
from .live_roots import live_roots

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a parameter lie."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    stride: tuple[int, ...]
    """Strides of the whole parameter, in elements."""
    start: int
    """First element that this rank holds, counted in the memory order that ``stride`` gives the whole parameter."""
    stop: int
    """One past the last; equal to ``start`` where it holds none."""
    unit: str | None
    """Name of the unit that the parameter is gathered with; None where it is not sharded."""
    shard: int = 0
    """Which of ``pieces`` this rank holds: its index among the ranks that share the unit."""
    pieces: tuple[tuple[int, int], ...] = ()
    """``(start, stop)`` of each of those ranks, in their order; ``(0, 0)`` for none. One where nothing is cut."""
    rows: tuple[int, int] | None = None
    """First and one past the last index of dimension 0 that this rank holds, where the layout cuts between them only;
    the parameter's own shape is then ``(rows, ...)``. None elsewhere."""


def placement_of(parameter: torch.Tensor) -> Placement:
    """See ``polyshard.placement``."""
    (found,) = live_roots.find((parameter,))
    if found is None:
        numel = parameter.numel()
        return Placement(tuple(parameter.shape), tuple(parameter.stride()), 0, numel, None, 0, ((0, numel),))
    unit, layout = found.unit, found.unit.layout
    shard = unit.grid.shard_rank
    if found.slot is None:
        size = layout.shard_numel
        pieces = tuple((rank * size, (rank + 1) * size) for rank in range(layout.world_size))
        return Placement((layout.padded_numel,), (1,), *pieces[shard], unit.name, shard, pieces)
    slot = layout.slots[found.slot]
    pieces = tuple(layout.range_of(found.slot, rank) for rank in range(layout.world_size))
    start, stop = pieces[shard]
    row = product(slot.shape[1:])
    rows = (start // row, stop // row) if slot.by_rows and row else None
    return Placement(slot.shape, slot.stride, start, stop, unit.name, shard, pieces, rows)


def dtensor_of(parameter: torch.Tensor) -> DTensor:
    """See ``polyshard.as_dtensor``."""
    (found,) = live_roots.find((parameter,))
    placed = placement_of(parameter)
    if found is None or found.slot is None or found.unit.grid.shard is None:
        raise UnsupportedError(
            f"as_dtensor() needs a parameter of which each rank holds a piece, but this one, of shape {placed.shape}, "
            "is whole here, or flat. Use it as it is."
        )
    unit, shard = found.unit, found.unit.grid.shard
    where = f"'{unit.parameters[found.slot].names[0]}' (rank {found.root.rank})"
    row = product(placed.shape[1:])
    each = -(-placed.shape[0] // shard.world_size) * row if placed.shape else 0
    numel = product(placed.shape)
    even = [(min(rank * each, numel), min((rank + 1) * each, numel)) for rank in range(shard.world_size)]
    if placed.rows is None or [_range(*piece) for piece in placed.pieces] != [_range(*piece) for piece in even]:
        raise UnsupportedError(
            f"The ranks do not hold of {where} what Shard(0) would give them: the ranges are {placed.pieces}. Shard it "
            "with layout='rows' as a unit of its own, with a number of rows that the number of ranks divides."
        )
    if shard.process_group is None:
        raise UnsupportedError(
            f"{type(shard).__name__} is behind no process group of torch.distributed, which a DTensor of {where} "
            "needs. Choose collectives of processes, such as gloo or nccl."
        )
    # Late: it takes longer to import than everything here.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(shard.process_group, parameter.device.type)
    return DTensor.from_local(
        parameter.detach(), mesh, [Shard(0)], run_check=False, shape=torch.Size(placed.shape), stride=placed.stride
    )


def _range(start: int, stop: int) -> tuple[int, int]:
    return (start, stop) if stop > start else (0, 0)
