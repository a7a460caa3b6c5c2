"""Which ranks share shards, and which hold the same one, as a strategy says."""

from __future__ import annotations

import os

from .config import ShardConfig, Strategy
from .errors import ConfigError, WorldSizeError
from .interfaces import Collectives


def strategy_for(config: ShardConfig, world_size: int) -> Strategy:
    """The configured one; of a single rank, that which shards nothing."""
    return Strategy.NO_SHARD if world_size == 1 else config.strategy


def rank_lists_for(config: ShardConfig, strategy: Strategy, world_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each shard group, and those of each replicate group.

    Raises:
        ConfigError: a hybrid strategy does not say how many ranks share a shard, or its mesh is not of all ranks.
        WorldSizeError: that many do not divide the world.
    """
    everyone = list(range(world_size))
    if strategy is Strategy.NO_SHARD:
        return [[rank] for rank in everyone], [everyone]
    if not strategy.hybrid:
        return [everyone], [[rank] for rank in everyone]
    if config.mesh is not None:
        rows = config.mesh.mesh.tolist()
        if sorted(rank for row in rows for rank in row) != everyone:
            raise ConfigError(
                f"A mesh for {strategy.value} must hold every one of the {world_size} ranks once, but it holds {rows}. "
                "Make it with init_device_mesh over the whole world."
            )
    else:
        size = config.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not size:
            raise ConfigError(
                f"{strategy.value} needs to know how many ranks share a shard: LOCAL_WORLD_SIZE is not set. "
                "Set shard_size= or mesh=."
            )
        if world_size % size:
            raise WorldSizeError(
                f"{world_size} ranks cannot be divided into shard groups of {size}. Choose a shard_size that divides "
                f"{world_size}."
            )
        rows = [everyone[start : start + size] for start in range(0, world_size, size)]
    return rows, [list(column) for column in zip(*rows, strict=True)]


def subgroup(world: Collectives, rank_lists: list[list[int]]) -> Collectives | None:
    """This rank's group of ``rank_lists``; None for a group of one. Every rank calls it."""
    size = len(rank_lists[0])
    if size == 1:
        return None
    return world if size == world.world_size else world.partition(rank_lists)
