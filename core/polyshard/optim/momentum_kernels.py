"""The passes of ``momentum.py`` as Triton kernels: each element is read once, computed with in fp32, written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _mix(mean, gradient, place, numel, momentum, nesterov: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    old = tl.load(mean + offsets, mask=inside, other=0.0)
    new = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    moved = old + (1 - momentum) * (new - old)
    tl.store(mean + offsets, moved, mask=inside)
    mixed = moved + (1 - momentum) * (new - moved) if nesterov else moved
    tl.store(place + offsets, mixed.to(place.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _go_along(parameter, direction, numel, keep, step, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    old = tl.load(parameter + offsets, mask=inside, other=0.0)
    along = tl.load(direction + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(parameter + offsets, old * keep + step * along, mask=inside)


def mix(mean: torch.Tensor, gradient: torch.Tensor, place: torch.Tensor, momentum: float, nesterov: bool) -> None:
    """``momentum.mix`` of one of each; ``mean`` in fp32, all contiguous."""
    numel = mean.numel()
    _mix[(triton.cdiv(numel, _BLOCK),)](mean, gradient, place, numel, momentum, nesterov, _BLOCK)


def go_along(parameter: torch.Tensor, direction: torch.Tensor, keep: float, step: float) -> None:
    """``parameter <- keep * parameter + step * direction``; ``parameter`` in fp32, both contiguous."""
    numel = parameter.numel()
    _go_along[(triton.cdiv(numel, _BLOCK),)](parameter, direction, numel, keep, step, _BLOCK)
