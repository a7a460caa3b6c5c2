"""Loss scaling where each rank sees a part of the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from polyshard.interfaces import Collectives, ReduceOp
from torch.amp.grad_scaler import GradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks agree on whether a step is skipped.

    A rank sees infinities and NaNs in its own shards of the gradients alone. ``unscale_`` therefore adds the ranks'
    findings over ``process_group``, by one all-reduce for each optimizer, so that all ranks step or none does, and all
    scales stay equal; a rank that has no gradients takes part as well. Gradients may be in fp16 (as with
    ``keep_low_precision_grads``), and on the CPU (as with ``CPUOffload``). ``scale`` returns each output in its own
    dtype.

    Args:
        device: type of the device that computes the loss.
        init_scale: first scale.
        backoff_factor: what the scale is multiplied by after a skipped step.
        growth_factor: what it is multiplied by after ``growth_interval`` steps in a row that were not skipped.
        growth_interval: how many steps these are.
        enabled: False makes ``step`` the optimizer's own, and all else do nothing.
        process_group: the ranks that hold parts of the same gradients; None for the default group.

    Raises:
        RuntimeError: ``unscale_`` is called twice for one optimizer before ``update``, or after its ``step``.
        ValueError: ``scale`` gets something that holds no tensors.
        AssertionError: ``update`` comes before any gradient was looked at.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            backoff_factor=backoff_factor,
            growth_factor=growth_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group
        self._unscaling = False

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale: a tensor, or lists, tuples and iterables of tensors in any nesting."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            # A scalar in half precision times the scale, which is fp32, would come out as fp32.
            return super().scale(outputs).to(outputs.dtype)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and learn whether any rank has one that is not finite.

        All ranks of the process group call it together, directly or by ``step``.
        """
        self._unscaling = True
        try:
            super().unscale_(optimizer)
        finally:
            self._unscaling = False

    # ``unscale_``, and the inf check for fused optimizers, both come through here: the one private method of torch's
    # scaler in which ranks can agree before anything is decided.
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        decides_on = found_inf.device
        if decides_on.type != "cpu" and _has_gradients_on_cpu(optimizer):
            # Torch copies both to the gradients' device without waiting, and the CPU would read them before they come.
            inv_scale, found_inf = inv_scale.cpu(), found_inf.cpu()
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self._unscaling)
        if not found:
            found = {found_inf.device: found_inf}
        self._agree(list(found.values()), decides_on)
        return found

    def _agree(self, found: list[torch.Tensor], device: torch.device) -> None:
        # One flag for all devices: ranks whose gradients are on different sets of devices make the same exchanges.
        flag = torch.stack([each.reshape(()).to(device) for each in found]).sum().reshape(1)
        if device.type == "cpu" and self._device != "cpu":
            flag = flag.to(self._device)
        group = self.process_group
        if isinstance(group, Collectives):
            group.all_reduce(flag, op=ReduceOp.SUM).wait()
        elif group is None or isinstance(group, dist.ProcessGroup) or group.size() > 1:
            dist.all_reduce(flag, group=group)
        for each in found:
            each.copy_(flag.reshape(each.shape))


def _has_gradients_on_cpu(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        parameter.grad is not None and parameter.grad.device.type == "cpu"
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
