"""A caster whose gathers carry bytes that are no dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from polyshard.interfaces import Collectives, PrecisionCapabilities, PrecisionCaster, UnitDtypes, UnitSpec, WireSpec


class Int8Wire(PrecisionCaster):
    """Parameters travel as int8 with one fp32 scale a rank; everything else stays in fp32."""

    capabilities = PrecisionCapabilities(encodes=True)
    _HEADER = 16

    def __init__(self) -> None:
        self.prepared: list[tuple[str, ...]] = []

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return UnitDtypes(compute=torch.float32, wire=torch.float32, reduce=torch.float32, grad=torch.float32)

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        return WireSpec(-(-(self._HEADER + unit.shard_numel) // 16) * 16)

    def prepare(self, units: Sequence[UnitSpec], collectives: Collectives) -> None:
        self.prepared.append(tuple(unit.name for unit in units))

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        scale = (shard.abs().amax() / 127.0).clamp(min=1e-12).reshape(1)
        wire[:4].copy_(scale.view(torch.uint8))
        values = (shard / scale).round().to(torch.int8)
        wire[self._HEADER : self._HEADER + shard.numel()].copy_(values.view(torch.uint8))

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        scales = wire[:, :4].clone().view(torch.float32)
        values = wire[:, self._HEADER : self._HEADER + unit.shard_numel].clone().view(torch.int8)
        torch.mul(values.float(), scales, out=out)
