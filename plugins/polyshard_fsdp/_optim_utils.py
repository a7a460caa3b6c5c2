"""Optimizer state dicts of FSDP instances."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: dict[str, Any] | None, group: Any
) -> dict[str, Any]:
    raise NotImplementedError


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool,
    load_directly: bool,
    group: Any,
) -> dict[str, Any]:
    raise NotImplementedError
