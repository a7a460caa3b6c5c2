"""The ranks that share a unit's shards, and those that hold the same shard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch

from ..config import PluginChoice, ShardConfig, Strategy
from ..errors import ConfigError, WorldSizeError
from ..interfaces import COMPLETED, BufferRole, Collectives, RankAndSize, ReduceOp, Work
from .answers import issued
from .parts import TensorPart


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """The ranks of one unit: who holds its parts, and whom its communication reaches.

    ==========================  =====================  ==================================
    unit                        owner                  replicate
    ==========================  =====================  ==================================
    FULL_SHARD, SHARD_GRAD_OP   all data ranks         none
    HYBRID_SHARD (and ZeRO-2)   ``shard_size`` ranks   the other data ranks
    NO_SHARD                    none                   all data ranks
    beside tensor parallelism   as above, of those with this rank's part of the parameters
    experts, ``mesh=`` of own   the ranks with these experts, along that mesh
    ==========================  =====================  ==================================

    Gathers and reductions reach the owners in all of these. They are fields of their own, since a unit may compute with
    another copy than its master.
    """

    world: Collectives
    """All ranks of the model, those of other units too."""
    owner: Collectives | None
    """Ranks that hold a part of the master and of the optimizer's state each; None where this rank holds all of it."""
    gather: Collectives | None
    """Ranks among which whole parameters are gathered; None where nothing is."""
    reduction: Collectives | None
    """Ranks among which gradients are reduced and scattered; None where each keeps them whole."""
    replicate: Collectives | None
    """Ranks that hold the same part, and add up its gradients behind that; None where there is no other."""
    divisor: float | None = None
    """What the sum of gradients over ``reduction`` and ``replicate`` is divided by; None for ``number``."""
    label: str = ""
    """The dimensions of the mesh, in messages: ``"dp"``, ``"edp and dp_replicate"``; empty where there is no mesh."""
    spread: int = 1
    """Groups of ranks in ``world`` that have other plain parameters under the unit's names, as experts do; 1 where all
    of them hold copies."""

    @classmethod
    def over(cls, world: Collectives, owner: Collectives | None, replicate: Collectives | None, **more: Any) -> Self:
        """The ranks of a unit that is gathered from its masters, and reduced to them."""
        return cls(world, owner, owner, owner, replicate, **more)

    @property
    def shard_size(self) -> int:
        """Number of shards of a unit."""
        return self.owner.world_size if self.owner else 1

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return self.owner.rank if self.owner else 0

    @property
    def number(self) -> int:
        """Ranks whose gradients are added up."""
        reduced = self.reduction.world_size if self.reduction else 1
        return reduced * (self.replicate.world_size if self.replicate else 1)

    @property
    def scale(self) -> float | None:
        """The factor of a mean over ``number`` ranks that makes it the sum by ``divisor``; None for 1."""
        return None if self.divisor is None or self.divisor == self.number else self.number / self.divisor

    @property
    def everyone(self) -> tuple[Collectives, ...]:
        """Groups through which a value reaches all ranks of the model, one after the other; empty for a single rank."""
        if self.world.world_size >= self.number:
            return (self.world,) if self.world.world_size > 1 else ()
        # The unit has groups of its own, beyond the world.
        return tuple(each for each in (self.owner, self.replicate) if each is not None)

    @property
    def alike(self) -> bool:
        """Whether all ranks of the model have pieces of the same parameters, and there are no other groups of them."""
        return self.world.world_size <= self.number

    def copies(self, part: TensorPart | None = None) -> int:
        """How many ranks of the model hold the same elements of a plain parameter, or of ``part``, as this rank.

        0 where the other parts are on ranks that are none of the model's.
        """
        others = self.spread
        if part is not None:
            # Along the dimensions of its mesh, it is the part that knows.
            others = part.number if self.spread == 1 else max(1, self.spread // part.copies)
        number = max(self.world.world_size, self.number)
        return 0 if number % (self.number * others) else number // (self.shard_size * others)

    @property
    def blends(self) -> bool:
        """Whether means of elements depend on the elements beside them."""
        return any(each.capabilities.blends for each in (self.reduction, self.replicate) if each is not None)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.owner is None and self.replicate is None

    def reduce(self, result: torch.Tensor, wire: torch.Tensor) -> Work:
        """Start taking the mean of ``wire`` (``[shard_size * n]``) over all ranks; ``result`` (``[n]``) gets the shard.

        ``wire`` is overwritten. Without shards the mean replaces it.
        """
        if self.reduction is None:
            if self.replicate is None:
                return COMPLETED
            return issued(self.replicate.all_reduce(wire, op=ReduceOp.MEAN), "all_reduce", self.replicate, "")
        scratch = self._scratch(self.reduction, result, wire)
        work = self.reduction.reduce_scatter(result, wire, op=ReduceOp.MEAN, scratch=scratch)
        work = issued(work, "reduce_scatter", self.reduction, "")
        return work if self.replicate is None else _ThenAllReduce(work, self.replicate, result)

    def reduce_many(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], results: torch.Tensor | None = None
    ) -> Work:
        """``reduce(result, wire)`` of units that have shards, in one launch where the backend can.

        ``results``: the memory of which each ``result`` is a range; needed for replicas, which reduce it as a whole.
        """
        among = self.reduction
        assert among is not None
        work = among.reduce_scatter_many(
            [(result, wire, self._scratch(among, result, wire)) for result, wire in pairs], op=ReduceOp.MEAN
        )
        work = issued(work, "reduce_scatter_many", among, "")
        if self.replicate is None:
            return work
        assert results is not None
        return _ThenAllReduce(work, self.replicate, results)

    @staticmethod
    def _scratch(among: Collectives, result: torch.Tensor, wire: torch.Tensor) -> torch.Tensor | None:
        nbytes = among.scratch_nbytes(BufferRole.REDUCE, wire.numel(), wire.dtype, result.dtype)
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
