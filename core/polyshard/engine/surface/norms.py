"""Gradient norms over all shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ...errors import ConfigError, NonFiniteError
from ...interfaces import Collectives, ReduceOp
from .. import _torch_private
from ..step.root import Root
from ..step.unit import Unit


def clip_grad_norm(
    root: Root, module: nn.Module, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their norm, over every rank's shards, is at most ``max_norm``.

    Norms are accumulated in fp32 (fp64 for fp64 gradients), with one all-reduce for each group of shards. Parameters
    outside of units count as the same on every rank.

    Raises:
        ConfigError: ``norm_type`` is not positive.
        NonFiniteError: ``error_if_nonfinite``, and the norm is infinite or not a number; on all ranks.
    """
    refuse_order(norm_type, "clip_grad_norm_", root.rank)
    shards = dict.fromkeys(unit.grid.shard for unit in root.units)
    told = told_of(norm_type, max_norm, error_if_nonfinite=error_if_nonfinite)
    with root.meeting("norm of gradients", shards, told):
        return _clip(root, module, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


def told_of(norm_type: float, max_norm: float | None = None, *, error_if_nonfinite: bool = False) -> str:
    """What ranks compare of a norm beside that there is one: each scales its own pieces by what it was given."""
    # A tensor would have to be waited for.
    most = f", at most {float(max_norm)}" if isinstance(max_norm, int | float) else ""
    return f" of order {float(norm_type)}{most}{', finite or an error' if error_if_nonfinite else ''}"


def _clip(
    root: Root, module: nn.Module, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    device = root.collectives.device
    groups: dict[Collectives | None, list[torch.Tensor]] = {}
    managed: set[nn.Parameter] = set()
    for unit in root.units:
        managed.update(unit.originals.tensors)
        # A rank without a part of any parameter still takes part in the reduction.
        group = groups.setdefault(unit.grid.shard, [])
        group += [parameter.grad for parameter in unit.receivers if parameter.grad is not None]
    outside = [parameter for parameter in module.parameters() if parameter not in managed]
    loose = [parameter.grad for parameter in outside if parameter.grad is not None]
    if loose:
        groups.setdefault(None, []).extend(loose)
    gradients = [gradient for group in groups.values() for gradient in group]
    wide = accumulator(root.units, gradients)
    norms = group_norms(groups, norm_type, wide, device)
    if not norms:
        return torch.zeros((), dtype=wide, device=device)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite:
        _refuse_not_finite(root, total, outside)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_place: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (place, dtype), tensors in by_place.items():
        _torch_private.foreach_mul_(tensors, factor.to(device=place, dtype=dtype))
    return total


def _refuse_not_finite(root: Root, total: torch.Tensor, outside: Sequence[nn.Parameter]) -> None:
    bad = (~total.isfinite()).to(torch.float32)
    if outside or any(unit.grid.shard is None or unit.grid.replicate is not None for unit in root.units):
        # What lies on several ranks should be the same there, but a fault may have hit one of them alone, and all must
        # come to the exchange below or none.
        root.collectives.all_reduce(bad, op=ReduceOp.MAX).wait()
    if not bad.item():
        return
    mine = [index for index, unit in enumerate(root.units) if not _all_finite(unit.receivers)]
    if not _all_finite(outside):
        mine.append(len(root.units))
    everyone: list[list[int]] = list(root.collectives.all_gather_object(mine))
    found = sorted({index for each in everyone for index in each})
    where = f"(rank {root.rank})"
    if not found:
        raise NonFiniteError(
            f"The norm of the gradients overflows although each gradient is finite {where}. Lower the loss scale or "
            "the learning rate, or clip with norm_type=float('inf'). Gradients are as they were."
        )
    first = found[0]
    ranks = [rank for rank, each in enumerate(everyone) if first in each]
    what = f"unit '{root.units[first].name}'" if first < len(root.units) else "a parameter outside of units"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    raise NonFiniteError(
        f"The gradient of {what} is not finite on ranks {ranks}{more} {where}. Skip the step, or look for its cause in "
        "the batch, the loss scale or the learning rate. Gradients are as they were."
    )


def _all_finite(parameters: Iterable[torch.Tensor]) -> bool:
    return all(bool(each.grad.isfinite().all()) for each in parameters if each.grad is not None)


def refuse_order(norm_type: float, call: str, rank: int) -> None:
    """Raise where norms of shards do not make a norm of the whole.

    Raises:
        ConfigError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ConfigError(
            f"{call} got norm_type={norm_type} (rank {rank}): norms of shards combine for positive orders alone. Give "
            "2.0, 1.0 or inf."
        )


def accumulator(units: Iterable[Unit], gradients: Iterable[torch.Tensor] = ()) -> torch.dtype:
    """The dtype in which norms add up: fp64 where any gradient is, else fp32. The same on all ranks."""
    # A rank may hold no fp64 shard where others do, so the units are asked too.
    if any(unit.dtypes.grad == torch.float64 for unit in units):
        return torch.float64
    return torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32


def group_norms(
    groups: Mapping[Collectives | None, Sequence[torch.Tensor]],
    norm_type: float,
    wide: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """The norm over each group of shards, 0-dim on ``device``; each group's ranks must be asked in one order.

    ``groups``: what this rank holds of each, which may be nothing. None: tensors that are whole on every rank.
    """
    infinite = math.isinf(norm_type)
    norms = []
    for shard, tensors in groups.items():
        power = _power(tensors, norm_type, wide, device)
        if shard is not None and infinite:
            # A maximum over ranks may drop what is not a number.
            told = torch.stack([power.nan_to_num(nan=0.0, posinf=math.inf), power.isnan().to(wide)])
            shard.all_reduce(told, op=ReduceOp.MAX).wait()
            power = told[0].masked_fill(told[1] > 0, math.nan)
        elif shard is not None:
            shard.all_reduce(power, op=ReduceOp.SUM).wait()
        norms.append(power if infinite else power ** (1.0 / norm_type))
    return norms


def _power(
    gradients: Sequence[torch.Tensor], norm_type: float, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=wide, device=device)
    places: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in present:
        places.setdefault(gradient.device, []).append(gradient)
    # By device: one launch each, which a mixed list would not have, and one copy of what is parked elsewhere.
    parts = [torch.stack(_torch_private.foreach_norm(each, norm_type, wide)).to(device) for each in places.values()]
    norms = parts[0] if len(parts) == 1 else torch.cat(parts)
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
