"""Gathers whose bytes are not the parameters in compute dtype."""

from __future__ import annotations

import torch

from ...interfaces import Collectives, PrecisionCaster, UnitSpec, WireSpec, Work


class EncodedGather:
    """Encodes the own shard, gathers the bytes, and decodes everybody's into the gather buffer."""

    def __init__(self, spec: UnitSpec, wire: WireSpec, caster: PrecisionCaster) -> None:
        self._spec = spec
        self.nbytes_per_rank = wire.nbytes_per_rank
        self._caster = caster

    def start(self, shard: Collectives, source: torch.Tensor, out: torch.Tensor) -> Work:
        """Issue the gather of ``source`` (``[shard_numel]``); its ``wait`` decodes into ``out`` (``[numel]``)."""
        wire = torch.empty(shard.world_size, self.nbytes_per_rank, dtype=torch.uint8, device=out.device)
        own = wire[shard.rank]
        self._caster.encode(self._spec, own, source)
        return _Decode(
            self._caster, self._spec, wire, out.view(shard.world_size, -1), shard.all_gather(wire.view(-1), own)
        )


class _Decode:
    """Waits for the bytes, then decodes them once."""

    def __init__(
        self, caster: PrecisionCaster, spec: UnitSpec, wire: torch.Tensor, out: torch.Tensor, gather: Work
    ) -> None:
        self._caster = caster
        self._spec = spec
        self._wire: torch.Tensor | None = wire
        self._out = out
        self._gather = gather

    def wait(self) -> None:
        self._gather.wait()
        if self._wire is not None:
            self._caster.decode(self._spec, self._wire, self._out)
            self._wire = None
