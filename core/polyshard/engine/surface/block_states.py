"""Optimizers of other packages that keep their state in blocks of a few bits, each with a scale of its own.

They count blocks from where the tensor begins that they are given: a piece. Where that is no whole number of blocks
behind the parameter's beginning, other elements share a scale than on the unsharded model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..step.unit import Unit
from .live_roots import Found


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How an optimizer divides a tensor."""

    size: int
    """Elements of a block."""
    smallest: int
    """Elements of a tensor below which its state is in full precision."""
    whole: bool
    """Whether that is so of a tensor that is not all whole blocks, too."""

    def divides(self, numel: int) -> bool:
        """Whether a tensor of so many elements has its state in blocks."""
        return numel >= self.smallest and not (self.whole and numel % self.size)

    def differ(self, unit: Unit, slot: int) -> bool:
        """Whether blocks of the pieces of a parameter, on any rank, are not those of the whole.

        Pieces that are too small to be divided are more exact than the whole, and do not count.
        """
        ranges = [unit.layout.range_of(slot, rank) for rank in range(unit.grid.shard_size)]
        there = [(start, stop - start) for start, stop in ranges if start < stop]
        if not self.divides(unit.layout.slots[slot].numel):
            return any(self.divides(numel) for _, numel in there)
        return any(
            start % self.size and max(before, numel) >= self.smallest for (_, before), (start, numel) in pairwise(there)
        )


def warn_of_cut_blocks(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Found]]) -> None:
    """Warn where the result differs from the unsharded model's. ``groups``: parameters in units that are cut."""
    blocks = _blocks_of(optimizer)
    if blocks is None:
        return
    # One of the ranks says it.
    for each in (each for group in groups for each in group if each.root.rank == 0):
        kind = f"{type(optimizer).__name__} keeps its state in blocks of {blocks.size} elements"
        if each.slot is None:
            if each.unit.layout.shard_numel >= blocks.smallest:
                warnings.warn(
                    f"{kind}, and divides the flat parameter of unit '{each.unit.name}' otherwise than each of its "
                    "parameters (rank 0): the result differs slightly from the unsharded model's. Give the optimizer "
                    "model.parameters(), and shard with layout={'name': 'blocks', 'size': 4096}.",
                    stacklevel=2,
                )
                return
        elif blocks.differ(each.unit, each.slot):
            warnings.warn(
                f"{kind}, and ranks cut '{each.unit.parameters[each.slot].names[0]}' inside of some (rank 0): the "
                "result differs slightly from the unsharded model's. Shard with layout={'name': 'blocks', 'size': "
                "4096}, or filter this warning.",
                stacklevel=2,
            )
            return


def _blocks_of(optimizer: torch.optim.Optimizer) -> _Blocks | None:
    """None of optimizers that treat all elements of a tensor alike."""
    packages = {kind.__module__.partition(".")[0] for kind in type(optimizer).__mro__}
    if "bitsandbytes" in packages:
        settings = getattr(optimizer, "args", None)
        if getattr(settings, "optim_bits", 32) == 8:
            return _Blocks(256, getattr(settings, "min_8bit_size", 4096), whole=False)
    size = getattr(optimizer, "block_size", None) if "torchao" in packages else None
    # Its optimizer that only rounds has one block of all.
    return _Blocks(int(size), 4096, whole=True) if size and math.isfinite(size) else None
