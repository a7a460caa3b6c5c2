import torch
from polyshard.interfaces import (
    PluginContext,
    PrecisionCapabilities,
    PrecisionCaster,
    UnitDtypes,
    UnitSpec,
    WireSpec,
)

_HEADER = 16  # bytes for the scale: the payload behind it stays aligned


class Int8Gather(PrecisionCaster):
    api_version = 1
    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, context: PluginContext) -> None:
        del context

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        dtype = unit.master_dtype
        return UnitDtypes(compute=dtype, wire=dtype, reduce=dtype, grad=dtype)

    def wire(self, unit: UnitSpec) -> WireSpec | None:
        if not unit.shard_numel:
            return None  # parameters without elements have no largest one
        return WireSpec(nbytes_per_rank=_HEADER + -(-unit.shard_numel // 16) * 16)

    def encode(self, unit: UnitSpec, wire: torch.Tensor, shard: torch.Tensor) -> None:
        scale = shard.abs().amax().float().clamp(min=1e-12) / 127
        wire[:4].view(torch.float32).copy_(scale)
        wire[_HEADER:].view(torch.int8)[: unit.shard_numel].copy_((shard / scale).round())

    def decode(self, unit: UnitSpec, wire: torch.Tensor, out: torch.Tensor) -> None:
        scales = wire[:, :4].view(torch.float32)
        out.copy_(wire[:, _HEADER:].view(torch.int8)[:, : unit.shard_numel] * scales)
