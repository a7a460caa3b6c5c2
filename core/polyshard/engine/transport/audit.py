"""The first step's check that all ranks issue the same collectives."""

from __future__ import annotations

import torch

from ...errors import RankMismatchError
from ...interfaces import Collectives


class Audit:
    """Compares each collective of the first forward and backward with the other ranks', before it is issued.

    Ranks that disagree would otherwise hang, or mix up bytes. Later steps repeat the recorded order, so the exchange is
    paid for once.
    """

    def __init__(self) -> None:
        #: Whether a whole forward was compared. Its backward still is, if there is one; the next forward is not.
        self.done = False

    def agree(self, world: Collectives, unit: str, operation: str, numel: int, dtype: torch.dtype) -> None:
        """Raise on every rank of ``world`` if any is about to do something else.

        ``numel``, ``dtype``: what travels, of all ranks together.

        Raises:
            RankMismatchError: saying what each rank is about to do.
        """
        if not world.capabilities.can_communicate:
            return
        mine = f"{operation} of unit '{unit}', {numel} elements of {dtype}"
        everyone = world.all_gather_object(mine)
        if any(other != mine for other in everyone):
            listed = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(everyone))
            raise RankMismatchError(
                f"Ranks are about to issue different collectives:\n{listed}\n"
                "Let every rank run the same modules in the same order, with the same settings."
            )
