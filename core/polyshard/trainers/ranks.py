"""The ranks between which a trainer divides its data."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from ..config import ShardConfig, Strategy
from ..errors import ConfigError


def keeps_whole(config: ShardConfig, world_size: int) -> bool:
    """Whether each of ``world_size`` ranks goes on holding whole parameters."""
    return world_size == 1 or config.strategy is Strategy.NO_SHARD


def with_ranks(config: ShardConfig) -> ShardConfig:
    """``config`` for the ranks that there are: one with nobody to speak to, where no launcher started the process."""
    if config.collectives != "auto" or config.mesh is not None or (dist.is_available() and dist.is_initialized()):
        return config
    return replace(config, collectives={"name": "fake", "world_size": 1})


def refuse_other_ranks(config: ShardConfig, trainer: str, world_size: int) -> None:
    """Raise where ``config`` shards over other ranks than the ``world_size`` between which ``trainer`` divides data.

    Raises:
        ConfigError: its mesh, process group or collectives are of another number of ranks.
    """
    for name, given in (("mesh", config.mesh), ("collectives", config.collectives)):
        size = getattr(given, "size", None)
        ranks = size() if callable(size) else getattr(given, "world_size", world_size)
        if ranks != world_size:
            raise ConfigError(
                f"The ShardConfig's {name} is of {ranks} ranks, but {trainer} divides its data between {world_size}: "
                "gradients would be the mean over a part of them. Give a mesh or a group of all ranks; for groups "
                "inside of it, a hybrid strategy."
            )
