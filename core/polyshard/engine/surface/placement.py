"""Which part of a whole parameter this rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .live_roots import live_roots


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the elements of a parameter lie that this rank holds."""

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


def placement_of(parameter: torch.Tensor) -> Placement:
    """See ``polyshard.placement``."""
    (found,) = live_roots.find((parameter,))
    if found is None:
        return Placement(tuple(parameter.shape), tuple(parameter.stride()), 0, parameter.numel(), None)
    unit, layout = found.unit, found.unit.layout
    if found.slot is None:
        start = unit.grid.shard_rank * layout.shard_numel
        return Placement((layout.padded_numel,), (1,), start, start + layout.shard_numel, unit.name)
    slot = layout.slots[found.slot]
    piece = next((piece for piece in unit.pieces if piece.slot == found.slot), None)
    start, stop = (piece.start, piece.stop) if piece is not None else (0, 0)
    return Placement(slot.shape, slot.stride, start, stop, unit.name)
