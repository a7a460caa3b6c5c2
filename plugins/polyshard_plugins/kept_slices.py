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
        # Of which master each copy is: where two models share a manager, units of theirs may be equal.
        self._current: dict[UnitSpec, int] = {}
        self._begun = False

    def expire(self) -> None:
        """A forward begins: every copy is old from now on; its memory waits for the next."""
        self._current.clear()
        self._begun = True

    def forget(self, unit: UnitSpec) -> None:
        """``unit`` has another master from now on."""
        self._current.pop(unit, None)

    def serve(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> bool:
        """Write the copy of ``master`` into ``own_slice`` (``[shard_numel]``); False where there is no current one."""
        copy = self._copies.get(unit)
        if copy is None or self._current.get(unit) != master.data_ptr() or copy.dtype != own_slice.dtype:
            return False
        own_slice.copy_(copy)
        return True

    def keep(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        """Copy ``own_slice``, just written from ``master``; not before the first forward, when a fetch is a trial."""
        if not self._begun:
            return
        copy = self._copies.get(unit)
        if copy is None or copy.dtype != own_slice.dtype:
            # One that was first made in an inference forward must serve training, too.
            with torch.inference_mode(False):
                copy = self._copies[unit] = torch.empty_like(own_slice)
        copy.copy_(own_slice)
        self._current[unit] = master.data_ptr()
