"""The device on which a trainer computes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..config import ShardConfig
from ..errors import ConfigError


def on_device(config: ShardConfig, device: torch.device, trainer: str, rank: int) -> ShardConfig:
    """``config`` with the device that ``trainer`` chose for this process.

    Raises:
        ConfigError: ``config`` names another one.
    """
    if device.type == "cpu":
        # Trainers may number it, and no tensor's has a number.
        device = torch.device("cpu")
    wanted = config.device
    if wanted is not None and (wanted.type != device.type or wanted.index not in (None, device.index)):
        raise ConfigError(
            f"ShardConfig(device='{wanted}') is not the device that {trainer} chose, '{device}' (rank {rank}). Leave "
            f"it out, and choose by {trainer}'s own settings."
        )
    return replace(config, device=device)
