"""What a gradient scaler on a device tells optimizers of gradients in host memory.

[Note: scales that arrive late]
``torch.amp.GradScaler`` and torch's fused optimizers bring scale and finding to where gradients are by copies that the
host does not wait for, into pinned memory. Host code reads them at once: gradients are then multiplied by what was
there before, and an infinity that was found is overwritten by the copy that comes behind it. From host memory, which is
not pinned, copies to the device are made before the call returns, and those to the host are none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def in_reach(scales: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """``scales``, on the host where one of the gradients is: see the note. Waits for the device then."""
    if scales.device.type == "cpu" or not any(_is_hosted(parameter) for parameter in parameters):
        return scales
    return scales.cpu()


def bring_in_reach(optimizer: torch.optim.Optimizer) -> None:
    """The same for what a scaler left with an optimizer that unscales by itself, before its step."""
    scale = getattr(optimizer, "grad_scale", None)
    if not isinstance(scale, torch.Tensor):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    told = {"grad_scale": in_reach(scale, parameters)}
    finding = getattr(optimizer, "found_inf", None)
    if isinstance(finding, torch.Tensor):
        told["found_inf"] = in_reach(finding, parameters)
    for name, value in told.items():
        setattr(optimizer, name, value)


def _is_hosted(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.device.type == "cpu"
