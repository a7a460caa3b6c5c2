"""Codecs of gathers: a precision plugin of int8, shards that a codec must take, and formulas of what arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from polyshard.interfaces import (
    Collectives,
    GatherEncoding,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)
from torch import nn


class Int8Encoding(PrecisionPlugin):
    """Parameters travel as int8 with one fp32 scale a rank; everything else stays in fp32."""

    capabilities = PrecisionCapabilities(encodes=True)
    _HEADER = 16

    def __init__(self) -> None:
        self.prepared: list[tuple[str, ...]] = []

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return UnitDtypes(compute=torch.float32, communication=torch.float32, reduce=torch.float32, grad=torch.float32)

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        return GatherEncoding(-(-(self._HEADER + unit.shard_numel) // 16) * 16)

    def prepare(self, units: Sequence[UnitSpec], collectives: Collectives) -> None:
        self.prepared.append(tuple(unit.name for unit in units))

    def encode(self, unit: UnitSpec, message: torch.Tensor, shard: torch.Tensor) -> None:
        scale = (shard.abs().amax() / 127.0).clamp(min=1e-12).reshape(1)
        message[:4].copy_(scale.view(torch.uint8))
        values = (shard / scale).round().to(torch.int8)
        message[self._HEADER : self._HEADER + shard.numel()].copy_(values.view(torch.uint8))

    def decode(self, unit: UnitSpec, message: torch.Tensor, out: torch.Tensor) -> None:
        scales = message[:, :4].clone().view(torch.float32)
        values = message[:, self._HEADER : self._HEADER + unit.shard_numel].clone().view(torch.int8)
        torch.mul(values.float(), scales, out=out)


LARGEST = {"int8": 127.0, "fp8": 448.0}
FP32_MAX = torch.finfo(torch.float32).max


def normal(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values as weights have them."""
    generator = torch.Generator().manual_seed(numel)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 0.02).to(dtype)


def many_magnitudes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1000, generator=generator) * torch.exp(10 * torch.randn(1000, generator=generator))


def random_bits() -> torch.Tensor:
    """Every kind of fp32: of 5000, some 20 are infinite or no number, and 20 subnormal."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (5000,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def not_finite() -> torch.Tensor:
    """Beside blocks of 16 that hold numbers alone: one with a NaN, one with each infinity."""
    values = normal(160)
    values[20], values[70], values[120] = math.nan, math.inf, -math.inf
    return values


def ties() -> torch.Tensor:
    """Halves beside 127 in each block of 16: the scale of int8 is 1, so that every second value lies in the middle."""
    halves = torch.arange(-60, 60) / 2.0
    return torch.cat([torch.cat([part, torch.tensor([127.0])]) for part in halves.split(15)])


#: By name. Lengths are such that blocks divide them, and such that they do not.
CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{f"{numel} elements": (lambda numel=numel: normal(numel)) for numel in (1, 5, 16, 31, 128, 129, 1000, 70001)},
    **{
        str(dtype): (lambda dtype=dtype: normal(333, dtype)) for dtype in (torch.float64, torch.bfloat16, torch.float16)
    },
    "many magnitudes": many_magnitudes,
    "random bits": random_bits,
    "not finite": not_finite,
    "ties": ties,
    "zeros": lambda: torch.zeros(300),
    "largest": lambda: torch.tensor([FP32_MAX, -FP32_MAX] * 20),
    "subnormal": lambda: torch.tensor([1e-40, -1e-45] * 20),
    "smallest scale": lambda: torch.linspace(-1.0, 1.0, 300) * 2.0**-120,
}


def decoded(shard: torch.Tensor, name: str, block: int) -> torch.Tensor:
    """What should arrive of ``shard`` (``[numel]``), in fp64, by the formula: fp32 comes within an ulp or so of it."""
    out = torch.empty(shard.numel(), dtype=torch.float64)
    for start in range(0, shard.numel(), block):
        values = shard[start : start + block].float().double()
        largest = values.abs().max()
        scale = max(float(largest) / LARGEST[name], 2.0**-126)
        if not math.isfinite(scale):
            out[start : start + block] = math.nan
            continue
        quotients = values / scale
        if name == "fp8":
            # 3 bits of mantissa above 2**-6, multiples of 2**-9 below.
            exponents = torch.floor(torch.log2(quotients.abs().clamp(min=2.0**-6)))
            steps = torch.exp2(exponents - 3)
        else:
            steps = torch.ones(())
        out[start : start + block] = torch.round(quotients / steps) * steps * scale
    return out


class Noted(torch.autograd.Function):
    """``x @ weight.T``, which notes the weight that forward and backward compute with."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.seen = seen
        seen.append(weight.clone())
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight.clone())
        return grad @ weight, grad.T @ x, None


class Watched(nn.Module):
    """One weight of 24 x 40; ``seen`` has what each forward and backward computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(960).view(24, 40))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Noted.apply(x, self.weight, self.seen)
        return out
