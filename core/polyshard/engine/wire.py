"""Gathers whose bytes are not the parameters in compute dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..interfaces import WireSpec, Work

if TYPE_CHECKING:
    from .unit import Unit


class EncodedGather:
    """Encodes the own shard, gathers the bytes, and decodes everybody's into the gather buffer."""

    def __init__(self, unit: Unit, wire: WireSpec) -> None:
        self._unit = unit
        self._nbytes = wire.nbytes_per_rank

    def start(self) -> Work:
        """Issue the gather; its ``wait`` decodes."""
        unit = self._unit
        shard = unit.grid.shard
        assert shard is not None
        wire = torch.empty(shard.world_size, self._nbytes, dtype=torch.uint8, device=unit.spec.device)
        own = wire[shard.rank]
        source = unit.master
        if unit.parks:
            source = torch.empty(unit.layout.shard_numel, dtype=unit.spec.master_dtype, device=unit.spec.device)
            unit.offload.fetch(unit.spec, unit.master, source)
        unit.caster.encode(unit.spec, own, source)
        return _Decode(unit, wire, shard.all_gather(wire.view(-1), own))


class _Decode:
    """Waits for the bytes, then decodes them once."""

    def __init__(self, unit: Unit, wire: torch.Tensor, gather: Work) -> None:
        self._unit = unit
        self._wire: torch.Tensor | None = wire
        self._gather = gather

    def wait(self) -> None:
        self._gather.wait()
        if self._wire is None:
            return
        unit = self._unit
        unit.caster.decode(unit.spec, self._wire, unit.buffer.flat.view(unit.layout.world_size, -1))
        self._wire = None
