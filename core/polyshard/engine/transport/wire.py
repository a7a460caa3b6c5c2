"""Gathers whose bytes are not the parameters in compute dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...interfaces import Collectives, PrecisionCaster, UnitSpec, Work
from ..planning.answers import issued


@dataclass(frozen=True, slots=True)
class EncodedGather:
    """Encodes the own shard, gathers the bytes, and decodes everybody's into the gather buffer."""

    spec: UnitSpec
    nbytes_per_rank: int
    caster: PrecisionCaster

    def start(self, shard: Collectives, source: torch.Tensor, out: torch.Tensor) -> Work:
        """Issue the gather of ``source`` (``[shard_numel]``); its ``wait`` decodes into ``out`` (``[numel]``)."""
        wire = torch.empty(shard.world_size, self.nbytes_per_rank, dtype=torch.uint8, device=out.device)
        own = wire[shard.rank]
        self.caster.encode(self.spec, own, source)
        gather = issued(shard.all_gather(wire.view(-1), own), "all_gather", shard, self.spec.label)
        return _Decode(self.caster, self.spec, wire, out.view(shard.world_size, -1), gather)


@dataclass(slots=True)
class _Decode:
    """Waits for the bytes, then decodes them once."""

    caster: PrecisionCaster
    spec: UnitSpec
    wire: torch.Tensor | None
    out: torch.Tensor
    gather: Work

    def wait(self) -> None:
        self.gather.wait()
        if self.wire is not None:
            self.caster.decode(self.spec, self.wire, self.out)
            self.wire = None
