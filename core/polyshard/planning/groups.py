"""The ranks that share a unit's shards, and those that hold the same shard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..config import PluginChoice, ShardConfig, Strategy
from ..errors import ConfigError, WorldSizeError
from ..interfaces import COMPLETED, BufferRole, Collectives, RankAndSize, ReduceOp, Work
from .answers import issued


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of a strategy: ``shard`` times ``replicate`` of them.

    ========================  ===============  ==================
    strategy                  shard            replicate
    ========================  ===============  ==================
    FULL_SHARD, SHARD_GRAD_OP all ranks        none
    HYBRID_SHARD (and ZeRO-2) ``shard_size``   the other ranks
    NO_SHARD                  none             all ranks
    ========================  ===============  ==================
    """

    world: Collectives
    """All ranks; from the plugin."""
    shard: Collectives | None
    """Ranks among which a unit is cut; None where each rank holds whole units."""
    replicate: Collectives | None
    """Ranks that hold the same shard; None where there is no other."""

    @property
    def shard_size(self) -> int:
        """Number of shards of a unit."""
        return self.shard.world_size if self.shard else 1

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return self.shard.rank if self.shard else 0

    @property
    def everyone(self) -> tuple[Collectives, ...]:
        """Groups through which a value reaches all ranks, one after the other; empty for a single rank."""
        replicas = self.replicate.world_size if self.replicate else 1
        if self.world.world_size == self.shard_size * replicas:
            return () if self.alone else (self.world,)
        # A drop-in may have the two groups alone.
        return tuple(each for each in (self.shard, self.replicate) if each is not None)

    @property
    def blends(self) -> bool:
        """Whether means of elements depend on the elements beside them."""
        return any(each.capabilities.blends for each in (self.shard, self.replicate) if each is not None)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.shard is None and self.replicate is None

    def reduce(self, result: torch.Tensor, wire: torch.Tensor) -> Work:
        """Start taking the mean of ``wire`` (``[shard_size * n]``) over all ranks; ``result`` (``[n]``) gets the shard.

        ``wire`` is overwritten. Without shards the mean replaces it.
        """
        if self.shard is None:
            if self.replicate is None:
                return COMPLETED
            return issued(self.replicate.all_reduce(wire, op=ReduceOp.MEAN), "all_reduce", self.replicate, "")
        scratch = self._scratch(self.shard, result, wire)
        work = self.shard.reduce_scatter(result, wire, op=ReduceOp.MEAN, scratch=scratch)
        work = issued(work, "reduce_scatter", self.shard, "")
        return work if self.replicate is None else _ThenAllReduce(work, self.replicate, result)

    def reduce_many(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], results: torch.Tensor | None = None
    ) -> Work:
        """``reduce(result, wire)`` of units that have shards, in one launch where the backend can.

        ``results``: the memory of which each ``result`` is a range; needed for replicas, which reduce it as a whole.
        """
        shard = self.shard
        assert shard is not None
        work = shard.reduce_scatter_many(
            [(result, wire, self._scratch(shard, result, wire)) for result, wire in pairs], op=ReduceOp.MEAN
        )
        work = issued(work, "reduce_scatter_many", shard, "")
        if self.replicate is None:
            return work
        assert results is not None
        return _ThenAllReduce(work, self.replicate, results)

    @staticmethod
    def _scratch(shard: Collectives, result: torch.Tensor, wire: torch.Tensor) -> torch.Tensor | None:
        nbytes = shard.scratch_nbytes(BufferRole.REDUCE, wire.numel(), wire.dtype, result.dtype)
        return torch.empty(nbytes, dtype=torch.uint8, device=wire.device) if nbytes else None


@dataclass(slots=True)
class _ThenAllReduce:
    """Reductions over shards, then over the replicas of each shard."""

    first: Work
    replicate: Collectives
    result: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.first.wait()
            self.replicate.all_reduce(self.result, op=ReduceOp.MEAN).wait()
            self.done = True


def group_of(config: ShardConfig) -> tuple[PluginChoice, Any | None, Any | None]:
    """The collectives' choice, the process group and the mesh that the configuration names."""
    choice, mesh = config.collectives, config.mesh
    if isinstance(choice, (str, Mapping, Collectives)):
        group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        return choice, group, mesh
    if isinstance(choice, torch.distributed.ProcessGroup):
        return "auto", choice, mesh
    if type(choice).__name__ == "DeviceMesh":
        return "auto", cast("Any", choice).get_group(), choice
    if isinstance(choice, RankAndSize):
        return "auto", choice, mesh
    return choice, None, mesh


def strategy_for(config: ShardConfig, world_size: int) -> Strategy:
    """The configured strategy; for a single rank the one that shards nothing."""
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
