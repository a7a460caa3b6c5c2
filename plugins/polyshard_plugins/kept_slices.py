"""What a rank sends of its units in a forward, kept on the device for the backward of that forward."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class KeptSlices:
    """A copy of each unit's own slice, in the compute dtype, on the device that computes.

    All calls come on the stream that gathers, which orders a copy behind the one before it.
    """

    def __init__(self) -> None:
        # By master, and for as long as that lives: a unit has another name once its model is part of a larger one, and
        # where two models share a manager, units of theirs may be equal.
        self._copies: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        # The addresses of masters of which the copy is current.
        self._current: set[int] = set()
        self._begun = False

    def expire(self) -> None:
        """A forward begins: every copy is old from now on; its memory waits for the next."""
        self._current.clear()
        self._begun = True

    def serve(self, master: torch.Tensor, own_slice: torch.Tensor) -> bool:
        """Write the copy of ``master`` into ``own_slice`` (``[shard_numel]``); False where there is no current one."""
        copy = self._copies.get(master)
        if copy is None or master.data_ptr() not in self._current or copy.dtype != own_slice.dtype:
            return False
        own_slice.copy_(copy)
        return True

    def keep(self, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        """Copy ``own_slice``, just written from ``master``; not before the first forward, when a fetch is a trial."""
        if not self._begun:
            return
        copy = self._copies.get(master)
        if copy is None or copy.dtype != own_slice.dtype:
            # One that was first made in an inference forward must serve training, too.
            with torch.inference_mode(False):
                copy = self._copies[master] = torch.empty_like(own_slice)
        copy.copy_(own_slice)
        self._current.add(master.data_ptr())
