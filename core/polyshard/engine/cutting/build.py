"""From drafts to units: parameters are cut, and what they held is let go of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .. import _torch_private
from ..parameters.lent import LendingParameters
from ..planning.draft import Draft
from ..planning.layout import FlatLayout
from ..planning.managed_parameter import ManagedParameter
from ..planning.ranks import RankGrid
from ..step.unit import Reshard, Unit
from .trials import park as park_one


def park(draft: Draft, masters: list[torch.Tensor] | None, grid: RankGrid, device: torch.device) -> list[torch.Tensor]:
    """The masters of one stage of which units are parked: those where their manager has them; the model stays as it is.

    ``masters``: emptied; None where the parameters hold the values.

    Raises:
        PluginContractError: ``place`` returned what no parameter can view, or a manager lost values.
    """
    if masters is not None:
        # Let go of one by one: the manager makes its own copy of each.
        masters.reverse()
    placed = []
    for unit, group in zip(draft.units, draft.stage.groups, strict=True):
        shard = masters.pop() if masters is not None else _cut(group, unit.layout, grid, device)
        placed.append(park_one(draft.offload, unit, shard, grid.world.rank) if unit.parked else shard)
    return placed


def cut(draft: Draft, grid: RankGrid, device: torch.device) -> list[torch.Tensor]:
    """This rank's elements of the parameters of one stage, copied to ``device``; the parameters stay as they are."""
    pairs = zip(draft.stage.groups, draft.units, strict=True)
    return [_cut(group, unit.layout, grid, device) for group, unit in pairs]


def build_units(
    draft: Draft, masters: list[torch.Tensor], grid: RankGrid, device: torch.device, reshard: Reshard
) -> list[Unit]:
    """The units of one stage: its parameters become views of ``masters`` (emptied), and what they held is let go of."""
    if draft.stage.host is not None:
        for module in draft.modules:
            module.__dict__["_parameters"] = LendingParameters(module._parameters)
    recurrent = [module for module in draft.modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        _torch_private.drop_rnn_references(module)
    masters.reverse()
    units = []
    for drafted, group in zip(draft.units, draft.stage.groups, strict=True):
        unit = Unit(
            drafted.spec,
            drafted.layout,
            group,
            grid,
            masters.pop(),
            drafted.dtypes,
            draft.caster,
            draft.offload,
            reshard=reshard if grid.shard is not None else Reshard.NEVER,
            wire=drafted.wire,
            parks=drafted.parked,
        )
        unit.watch(drafted.observers)
        units.append(unit)
    for module in recurrent:
        module.__dict__.update(_torch_private.rnn_weights(module, module._parameters))
    for module in draft.modules:
        place_buffers(module, device, draft.buffer_dtype)
    return units


def place_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Move the buffers that ``module`` holds directly to ``device``, floating-point ones also to ``dtype``."""
    for key, buffer in module._buffers.items():
        if buffer is None:
            continue
        wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
        if buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device, dtype=wanted)
        elif buffer.device != device or buffer.dtype != wanted:
            module._buffers[key] = buffer.to(device=device, dtype=wanted)


def is_meta(buffer: torch.Tensor | None) -> bool:
    """Whether a buffer has no values yet."""
    return buffer is not None and buffer.is_meta


def _cut(group: Sequence[ManagedParameter], layout: FlatLayout, grid: RankGrid, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        master = torch.zeros(layout.shard_numel, dtype=group[0].original.dtype, device=device)
        for piece in layout.pieces(grid.shard_rank):
            slot = layout.slots[piece.slot]
            source = group[piece.slot].original.detach()
            if source.stride() != slot.stride:
                source = source.contiguous()
            elements = source.as_strided((slot.numel,), (1,), source.storage_offset())[piece.start : piece.stop]
            master.narrow(0, piece.shard_offset, piece.numel).copy_(elements)
    return master
