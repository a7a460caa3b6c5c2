"""On which device a model computes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from .config import ShardConfig
from .interfaces import Collectives


def compute_device(config: ShardConfig, module: nn.Module, ignored_modules: Collection[nn.Module]) -> torch.device:
    """Where ``module`` computes: where the configuration says, or its collectives; else where its parameters are."""
    if config.device is not None:
        device = config.device
    else:
        ignored = {inner for outer in ignored_modules for inner in outer.modules()}
        places = {
            parameter.device
            for inner in module.modules()
            if inner not in ignored
            for parameter in inner._parameters.values()
            if parameter is not None and not parameter.is_meta
        }
        if isinstance(config.collectives, Collectives):
            device = config.collectives.device
        elif places:
            device = sorted(places, key=str)[0]
        else:
            # A build with CUDA names its accelerator on machines that have none.
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator or torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device
