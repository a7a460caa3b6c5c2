"""Private names of torch that the optimizers need (torch 2.11 to 2.13), each with the reason.

``torch._foreach_*``: one launch for many tensors, which torch's own optimizers have and nothing public offers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def foreach_copy_(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its place, casting on the way."""
    torch._foreach_copy_(list(places), list(sources))


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all tensors by a number, or by a scalar tensor without reading it on the host."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_lerp_(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """``tensor += weight * (end - tensor)`` for each."""
    torch._foreach_lerp_(list(tensors), list(ends), weight)


def foreach_lerp(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> list[torch.Tensor]:
    """``tensor + weight * (end - tensor)`` of each."""
    return list(torch._foreach_lerp(list(tensors), list(ends), weight))
