"""Gradient norms over all shards."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..errors import ConfigError
from ..interfaces import Collectives, ReduceOp
from . import _torch_private
from .root import Root


def clip_grad_norm(root: Root, module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients so that their norm, over every rank's shards, is at most ``max_norm``.

    Norms are accumulated in fp32 (fp64 for fp64 gradients), with one all-reduce for each group of shards. Parameters
    outside of units count as the same on every rank.

    Raises:
        ConfigError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ConfigError(
            f"clip_grad_norm_ got norm_type={norm_type} (rank {root.rank}): norms of shards combine for positive "
            "orders alone. Give 2.0, 1.0 or inf."
        )
    device = root.collectives.device
    groups: dict[Collectives | None, list[torch.Tensor]] = {}
    managed: set[nn.Parameter] = set()
    for unit in root.units:
        managed.update(unit.originals.tensors)
        for parameter in unit.receivers:
            if parameter.grad is not None:
                groups.setdefault(unit.grid.shard, []).append(parameter.grad)
        # A rank without a part of any parameter still takes part in the reduction.
        groups.setdefault(unit.grid.shard, [])
    loose = [
        parameter.grad for parameter in module.parameters() if parameter not in managed and parameter.grad is not None
    ]
    if loose:
        groups.setdefault(None, []).extend(loose)
    gradients = [gradient for group in groups.values() for gradient in group]
    wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    # A rank may hold no fp64 shard where others do: the accumulator's dtype must not depend on that.
    if any(unit.dtypes.grad == torch.float64 for unit in root.units):
        wide = torch.float64
    infinite = math.isinf(norm_type)
    op = ReduceOp.MAX if infinite else ReduceOp.SUM
    powers = []
    for shard, group in groups.items():
        power = _power(group, norm_type, wide, device)
        if shard is not None:
            shard.all_reduce(power, op=op).wait()
        powers.append(power)
    if not powers:
        return torch.zeros((), dtype=wide, device=device)
    stacked = torch.stack(powers)
    total = stacked.max() if infinite else stacked.sum() ** (1.0 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_place: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (place, dtype), group in by_place.items():
        _torch_private.foreach_mul_(group, factor.to(device=place, dtype=dtype))
    return total


def _power(gradients: list[torch.Tensor], norm_type: float, wide: torch.dtype, device: torch.device) -> torch.Tensor:
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(device) for norm in _torch_private.foreach_norm(present, norm_type, wide)])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
