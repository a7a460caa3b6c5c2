"""Every private torch name that the drop-in uses, with the reason. Run on torch 2.11 and 2.13 by the test suite."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_replicated_in_place(module: nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` was applied to ``module``; it leaves no public mark."""
    return "replicate" in (_get_registry(module) or ())


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that ``tensor`` is made of: itself, or what a wrapper such as a ``DTensor`` holds inside.

    A collective takes the former alone, and no public call opens the latter.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = (getattr(tensor, name) for name in names)
    return [plain for held in inner if isinstance(held, torch.Tensor) for plain in plain_tensors(held)]
