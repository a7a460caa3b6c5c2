"""One pretended rank, which answers as if every other rank had sent what this one sends: nothing travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from polyshard.errors import WorldSizeError
from polyshard.interfaces import COMPLETED, Collectives, CollectivesCapabilities, PluginContext, ReduceOp, Work


class Loopback(Collectives):
    """``world_size`` pretended ranks, of which this one is ``rank``, on the CPU."""

    api_version = 1
    capabilities = CollectivesCapabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.float64}),
        reduce_ops=frozenset(ReduceOp),
        widening=False,
        stream_ordered=False,
        capturable=False,
        fixed_addresses=False,
        can_communicate=False,
    )
    rank = 0
    world_size = 1
    device = torch.device("cpu")

    def __init__(self, context: PluginContext, world_size: int = 1, rank: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise WorldSizeError(
                f"collectives {context.name!r} have no rank {rank} of {world_size}; give one from 0 to {world_size - 1}"
            )
        self.rank, self.world_size, self._context = rank, world_size, context

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        out.view(self.world_size, -1).copy_(shard.expand(self.world_size, -1))
        return COMPLETED

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        *,
        op: ReduceOp,
        scratch: torch.Tensor | None = None,
    ) -> Work:
        out.copy_(full.view(self.world_size, out.numel())[self.rank])
        return self.all_reduce(out, op=op)

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        if op is ReduceOp.SUM:  # the mean, the largest and the smallest of equal values are that value
            tensor.mul_(self.world_size)
        return COMPLETED

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return COMPLETED

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self.world_size

    def barrier(self) -> None:
        return None

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Loopback:
        if sorted(rank for ranks in rank_lists for rank in ranks) != list(range(self.world_size)):
            raise WorldSizeError(f"{rank_lists} do not cover {self.world_size} ranks once each; list every rank once")
        own = next(list(ranks) for ranks in rank_lists if self.rank in ranks)
        return Loopback(self._context, world_size=len(own), rank=own.index(self.rank))
