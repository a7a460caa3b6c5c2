"""What a rank sends of its units in a forward, kept on the device for the backward of that forward."""

from __future__ import annotations

import torch
from polyshard.interfaces import UnitSpec


class KeptSlices:
    """A copy of each unit's own slice, in the compute dtype, on the device that computes.

    All calls come on the stream that gathers, which orders a copy behind the one before it.
    """

    def __init__(self) -> None:
        self._copies: dict[UnitSpec, torch.Tensor] = {}
        self._current: set[UnitSpec] = set()

    def expire(self) -> None:
        """Every copy is old from now on; its memory waits for the next."""
        self._current.clear()

    def serve(self, unit: UnitSpec, own_slice: torch.Tensor) -> bool:
        """Write the copy into ``own_slice`` (``[shard_numel]``); False, and nothing, where there is no current one."""
        copy = self._copies.get(unit)
        if copy is None or unit not in self._current or copy.dtype != own_slice.dtype:
            return False
        own_slice.copy_(copy)
        return True

    def keep(self, unit: UnitSpec, own_slice: torch.Tensor) -> None:
        """Copy ``own_slice``, which has just been written."""
        copy = self._copies.get(unit)
        if copy is None or copy.dtype != own_slice.dtype:
            # One that was first made in an inference forward must serve training, too.
            with torch.inference_mode(False):
                copy = self._copies[unit] = torch.empty_like(own_slice)
        copy.copy_(own_slice)
        self._current.add(unit)
