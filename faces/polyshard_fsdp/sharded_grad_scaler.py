"""Loss scaling where each rank sees a part of the gradients: torch's own, and agreement for fused optimizers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ._torch_private import TorchScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(TorchScaler):  # type: ignore[misc]
    """Torch's scaler, whose ranks agree on whether an optimizer that looks at the scale itself steps, too.

    Torch's asks the ranks in ``unscale_`` alone. Where a fused optimizer steps without that, each rank would decide by
    its own shards.
    """

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        found: dict[torch.device, torch.Tensor] = super()._check_inf_per_device(optimizer)
        # One flag for all devices: ranks whose gradients are on different sets of devices make the same exchanges.
        flag = torch.stack([each.reshape(()).to(self._device) for each in found.values()]).sum().reshape(1)
        dist.all_reduce(flag, group=self.process_group)
        for each in found.values():
            each.copy_(flag.reshape(each.shape))
        return found
