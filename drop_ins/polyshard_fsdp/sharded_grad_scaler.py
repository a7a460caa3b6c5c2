"""Loss scaling where each rank sees a part of the gradients: torch's own, and ranks agree in every look at them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from polyshard.interfaces import Collectives, ReduceOp
from torch.amp.grad_scaler import GradScaler

from ._torch_private import TorchScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(TorchScaler):  # type: ignore[misc]
    """Torch's scaler, but for three things that go wrong in it without a word.

    - Ranks agree in every look at gradients, and not in ``unscale_`` alone: a fused optimizer looks by itself.
    - Gradients in host memory, as of ``CPUOffload``, are looked at once the scale is there: torch copies it to them
      without waiting.
    - All ranks make the same one exchange, on whichever devices their gradients are.
    """

    _unscaling = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and learn whether any rank has one that is not finite.

        All ranks of the process group call it together, directly or by ``step``. Raises what torch's does.
        """
        self._unscaling = True
        try:
            # Torch's for FSDP would exchange what is agreed upon already, device by device.
            GradScaler.unscale_(self, optimizer)
        finally:
            self._unscaling = False

    # ``unscale_``, and the look of fused optimizers, both come through here: the one method of torch's scaler in which
    # ranks can agree before anything is decided.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        device = found_inf.device
        gradients = (each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None)
        if device.type != "cpu" and any(each.device.type == "cpu" for each in gradients):
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            optimizer, inv_scale, found_inf, allow_fp16 or self._unscaling
        )
        flag = torch.stack([each.reshape(()).to(device) for each in found.values()]).sum().reshape(1)
        if device.type == "cpu" and self._device != "cpu":
            flag = flag.to(self._device)
        if isinstance(self.process_group, Collectives):
            self.process_group.all_reduce(flag, op=ReduceOp.SUM).wait()
        else:
            dist.all_reduce(flag, group=self.process_group)
        for each in found.values():
            each.copy_(flag.reshape(each.shape))
        return found
