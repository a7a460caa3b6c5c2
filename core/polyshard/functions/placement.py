"""Where the elements of a sharded parameter lie, and the parameter as a ``DTensor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import UnsupportedError
from ..planning.layout import product
from ..planning.parts import TensorPart
from ..runtime.live_roots import live_roots

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a parameter lie."""

    shape: tuple[int, ...]
    """Shape of the whole parameter; of this rank's part of it, beside tensor or expert parallelism."""
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
    ranks: str = ""
    """The dimensions of the mesh that the unit is cut over, and replicated; empty where no mesh was given."""
    part: TensorPart | None = None
    """The part of a larger tensor that all of the above is about: mesh, placements and shape of its ``DTensor``, with
    the part's offset and sizes. None for a parameter that was no ``DTensor``."""


def placement(parameter: torch.Tensor) -> Placement:
    """Which elements of ``parameter`` this rank holds, and what shape the whole has.

    A sharded parameter is a 1-D tensor, or ``(rows, ...)`` where the layout cuts between rows only, and empty on ranks
    without a part of it: what is decided by shape, such as which parameters decay, is to be decided by
    ``placement(parameter).shape``. Nothing is communicated. A parameter that is not sharded lies here as a whole. A
    flat parameter is that of its unit's padded elements.
    """
    (found,) = live_roots.find((parameter,))
    if found is None:
        numel = parameter.numel()
        return Placement(tuple(parameter.shape), tuple(parameter.stride()), 0, numel, None, 0, ((0, numel),))
    unit, layout = found.unit, found.unit.layout
    shard = unit.ranks.shard_rank
    if found.slot is None:
        size = layout.shard_numel
        pieces = tuple((rank * size, (rank + 1) * size) for rank in range(layout.world_size))
        return Placement((layout.padded_numel,), (1,), *pieces[shard], unit.name, shard, pieces)
    slot = layout.slots[found.slot]
    if slot.dim:
        raise UnsupportedError(
            f"placement() of '{found.name}' (rank {found.root.rank}), which is cut along dimension {slot.dim}: its "
            "pieces are no ranges of elements. Ask the DTensor for its placements."
        )
    pieces = tuple(layout.range_of(found.slot, rank) for rank in range(layout.world_size))
    start, stop = pieces[shard]
    row = product(slot.shape[1:])
    rows = (start // row, stop // row) if slot.by_rows and row else None
    part = unit.parameters[found.slot].part
    return Placement(slot.shape, slot.stride, start, stop, unit.name, shard, pieces, rows, unit.ranks.label, part)


def as_dtensor(parameter: torch.Tensor) -> DTensor:
    """The whole ``parameter`` as a ``DTensor`` with placement ``Shard(0)`` over this rank's piece, which is not copied.

    For code that computes with DTensors. It is detached: gradients arrive in ``parameter.grad``. Every rank calls it,
    in the same order.

    Raises:
        UnsupportedError: ranks hold other rows of it than ``Shard(0)`` would give them, or it is not sharded.
    """
    (found,) = live_roots.find((parameter,))
    placed = placement(parameter)
    if found is None or found.slot is None or found.unit.ranks.owner is None:
        raise UnsupportedError(
            f"as_dtensor() needs a parameter of which each rank holds a piece, but this one, of shape {placed.shape}, "
            "is whole here, or flat. Use it as it is."
        )
    if placed.part is not None:
        raise UnsupportedError(
            f"as_dtensor() of '{found.name}' (rank {found.root.rank}): tensor or expert parallelism cut it before, so "
            "that its pieces are no Shard(0) of the whole. Use it inside of 'with polyshard.unsharded(model)', where "
            "it is a DTensor over its own mesh."
        )
    shard = found.unit.ranks.owner
    where = f"'{found.name}' (rank {found.root.rank})"
    row = product(placed.shape[1:])
    each = -(-placed.shape[0] // shard.world_size) * row if placed.shape else 0
    numel = product(placed.shape)
    even = [(min(rank * each, numel), min((rank + 1) * each, numel)) for rank in range(shard.world_size)]
    if placed.rows is None or [_range(*piece) for piece in placed.pieces] != [_range(*piece) for piece in even]:
        raise UnsupportedError(
            f"The ranks do not hold of {where} what Shard(0) would give them: the ranges are {placed.pieces}. Shard it "
            "with layout='rows' as a unit of its own, with a number of rows that the number of ranks divides."
        )
    # Imported late: it takes longer to import than everything here.
    from torch.distributed.tensor import DTensor, Shard

    from ..planning.device_mesh import mesh_over

    mesh = mesh_over(shard, parameter.device.type)
    return DTensor.from_local(
        parameter.detach(), mesh, [Shard(0)], run_check=False, shape=torch.Size(placed.shape), stride=placed.stride
    )


def _range(start: int, stop: int) -> tuple[int, int]:
    return (start, stop) if stop > start else (0, 0)
