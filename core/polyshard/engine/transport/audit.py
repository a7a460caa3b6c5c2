"""The check that all ranks issue the same collectives: in the first step, or in all."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import PluginContractError, RankMismatchError
from ...interfaces import Collectives
from ..planning.answers import plugin_name
from ..planning.values import checksum

_REMEDY = (
    "Let every rank run the same modules in the same order, with the same settings. What some ranks skip, as a tower "
    "without an image or an expert without a token, must be no unit by itself: leave its class out of the policy "
    "(leave_out of 'transformers', force_leaf of 'size' and 'budget'), so that it is gathered with the module around "
    "it, and set split_root=False where that is the whole model. Or let all ranks run it, with inputs that do not "
    "count."
)


class Audit:
    """Compares each collective with the other ranks', before it is issued.

    Ranks that disagree would otherwise hang, or mix up bytes. Later steps mostly repeat the first, in which alone the
    exchange is paid for unless ``check_ranks="always"`` says otherwise.
    """

    def __init__(self) -> None:
        #: Whether a whole forward was compared. Its backward still is, if there is one; the next forward is not.
        self.done = False
        #: The units of which a gather was compared.
        self.gathered: set[str] = set()

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
            raise RankMismatchError(f"Ranks are about to issue different collectives:\n{listed}\n{_REMEDY}")

    def compare_gathered(
        self, group: Collectives, unit: str, buffer: torch.Tensor, own: torch.Tensor, sent: torch.Tensor | None
    ) -> None:
        """Raise on every rank of ``group`` if a gather did not leave the same bytes on all.

        ``buffer``: the whole unit, compute ordered after its gather; ``own``: this rank's slice of it; ``sent``: what
        was to be in there, None where that is not known. Waits for the device, in the first forward only.

        Raises:
            PluginContractError: naming the collectives, the unit, and the ranks that hold something else.
        """
        if not group.capabilities.can_communicate:
            return
        kept = sent is None or bool(checksum(own) == checksum(sent.to(own.dtype)))
        everyone: list[Any] = group.all_gather_object([f"gather of unit '{unit}'", int(checksum(buffer)), kept])
        if any(each[0] != everyone[0][0] for each in everyone):
            listed = "\n".join(f"  rank {rank}: {each[0]}" for rank, each in enumerate(everyone))
            raise RankMismatchError(f"Ranks wait for different collectives:\n{listed}\n{_REMEDY}")
        name = f"all_gather of {plugin_name(group)}"
        lost = [rank for rank, each in enumerate(everyone) if not each[2]]
        if lost:
            raise PluginContractError(
                f"{name} changed the own slices of ranks {lost} in unit '{unit}' (rank {group.rank}). What is gathered "
                "in place must stay as it is."
            )
        sums = [each[1] for each in everyone]
        if len(set(sums)) > 1:
            raise PluginContractError(
                f"{name} did not leave the same bytes of unit '{unit}' on all ranks (rank {group.rank} of "
                f"{group.world_size}; checksums by rank: {sums[:16]}). Fill 'out' with every rank's shard, in the "
                "order of ranks."
            )
