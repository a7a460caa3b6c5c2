"""The passes over memory around an orthogonalisation: a running mean, and a step along the result.

On CUDA each is one Triton kernel a tensor. Built of torch's operations they would move twice as much and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from .. import _torch_private


def mix(
    means: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    momentum: float,
    nesterov: bool,
) -> None:
    """Move each mean towards its gradient by ``1 - momentum``; into each place goes the mean, or Nesterov's mixture.

    That is the gradient moved by ``momentum`` towards the new mean.
    """
    kernels = _kernels(means[0]) if means else None
    if kernels is not None and all(map(_dense, means, gradients, places)):
        for mean, gradient, place in zip(means, gradients, places, strict=True):
            kernels.mix(mean, gradient, place, momentum, nesterov)
        return
    held, given = list(means), list(gradients)
    _torch_private.foreach_lerp_(held, given, 1 - momentum)
    mixed = list(_torch_private.foreach_lerp(given, held, momentum)) if nesterov else held
    _torch_private.foreach_copy_(list(places), mixed)


def go_along(
    parameters: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    lr: float | torch.Tensor,
    ratio: float,
    weight_decay: float,
) -> None:
    """``parameter <- parameter (1 - lr weight_decay) - lr ratio direction`` for each."""
    kernels = _kernels(parameters[0]) if parameters else None
    if kernels is not None and not isinstance(lr, torch.Tensor) and all(map(_dense, parameters, directions)):
        for parameter, direction in zip(parameters, directions, strict=True):
            kernels.go_along(parameter, direction, 1 - lr * weight_decay, -lr * ratio)
        return
    _torch_private.foreach_mul_(list(parameters), 1 - lr * weight_decay)
    for parameter, direction in zip(parameters, directions, strict=True):
        if isinstance(lr, torch.Tensor):
            parameter.addcmul_(direction, lr.to(direction.device), value=-ratio)
        else:
            parameter.add_(direction, alpha=-lr * ratio)


def _dense(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether all of them lie in memory in one order, without gaps."""
    return first.is_contiguous() and all(each.is_cuda and each.stride() == first.stride() for each in others)


def _kernels(tensor: torch.Tensor) -> ModuleType | None:
    """The kernels, where ``tensor`` is on CUDA, in fp32, and this build of torch comes with Triton."""
    if not tensor.is_cuda or tensor.dtype != torch.float32:
        return None
    try:
        from . import momentum_kernels
    except ImportError:
        return None
    return momentum_kernels
