"""A planned stage laid out, and from there its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..interfaces import OffloadManager, PrecisionCaster, UnitDtypes, UnitSpec
from . import _torch_private
from .layout import FlatLayout, plan_layout
from .lent import LendingParameters
from .originals import ManagedParameter
from .plan import PlannedStage
from .ranks import RankGrid
from .unit import Reshard, Unit


@dataclass(frozen=True, slots=True)
class Draft:
    """What a stage will be, before any memory is taken for it."""

    stage: PlannedStage
    modules: tuple[nn.Module, ...]
    """The modules inside the stage's that no inner stage owns."""
    caster: PrecisionCaster
    spec: UnitSpec
    """Of the first unit; of an empty one where the stage has no parameters of its own."""
    specs: tuple[UnitSpec, ...]
    layouts: tuple[FlatLayout, ...]
    dtypes: tuple[UnitDtypes, ...]

    @property
    def has_meta_parameters(self) -> bool:
        """Whether any of its parameters has no values yet."""
        return any(parameter.original.is_meta for group in self.stage.groups for parameter in group)


def draft_stage(
    stage: PlannedStage,
    modules: Sequence[nn.Module],
    grid: RankGrid,
    device: torch.device,
    caster: PrecisionCaster,
    *,
    is_root: bool,
) -> Draft:
    """Lay out the units of ``stage``."""
    specs: list[UnitSpec] = []
    layouts, dtypes = [], []
    for group in stage.groups:
        suffix = _suffix(group) if specs else ""
        shapes = [tuple(parameter.original.shape) for parameter in group]
        strides = [parameter.original.stride() for parameter in group]
        # Alignment follows from what travels, which the caster tells from a spec: ask with the master's layout first.
        itemsize = group[0].original.dtype.itemsize
        layout = plan_layout(shapes, strides, world_size=grid.shard_size, itemsize=itemsize)
        spec = _spec(stage, group, layout, device, suffix, is_root)
        chosen = caster.dtypes(spec)
        travels = min(chosen.compute.itemsize, chosen.wire.itemsize)
        if travels != itemsize:
            layout = plan_layout(shapes, strides, world_size=grid.shard_size, itemsize=travels)
            spec = _spec(stage, group, layout, device, suffix, is_root)
        specs.append(spec)
        layouts.append(layout)
        dtypes.append(chosen)
    empty = UnitSpec(stage.name, type(stage.governing), (), 0, 0, stage.dtype, device, is_root)
    return Draft(
        stage, tuple(modules), caster, specs[0] if specs else empty, tuple(specs), tuple(layouts), tuple(dtypes)
    )


def build_units(
    draft: Draft,
    masters: list[torch.Tensor] | None,
    grid: RankGrid,
    device: torch.device,
    offload: OffloadManager,
    reshard: Reshard,
) -> list[Unit]:
    """The units of one stage. ``masters``: emptied; None where the parameters hold the values, of which this rank's are
    copied to ``device``, and the rest is let go of.
    """
    groups = draft.stage.groups
    if draft.stage.host is not None:
        for module in draft.modules:
            module.__dict__["_parameters"] = LendingParameters(module._parameters)
    if masters is None:
        masters = [_cut(group, layout, grid, device) for group, layout in zip(groups, draft.layouts, strict=True)]
    recurrent = [module for module in draft.modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        _torch_private.drop_rnn_references(module)
    # Let go of one by one: an offload manager makes its own copy of each.
    masters.reverse()
    units = [
        Unit(
            spec,
            layout,
            group,
            grid,
            masters.pop(),
            dtypes,
            draft.caster,
            offload,
            reshard=reshard if grid.shard is not None else Reshard.NEVER,
        )
        for spec, layout, group, dtypes in zip(draft.specs, draft.layouts, groups, draft.dtypes, strict=True)
    ]
    for module in recurrent:
        module.__dict__.update(_torch_private.rnn_weights(module, module._parameters))
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


def _spec(
    stage: PlannedStage,
    group: Sequence[ManagedParameter],
    layout: FlatLayout,
    device: torch.device,
    suffix: str,
    is_root: bool,
) -> UnitSpec:
    return UnitSpec(
        name=f"{stage.name}{suffix}",
        module_class=type(stage.governing),
        parameter_names=tuple(parameter.names[0] for parameter in group),
        numel=layout.padded_numel,
        shard_numel=layout.shard_numel,
        master_dtype=group[0].original.dtype,
        device=device,
        is_root=is_root,
        suffix=suffix,
    )


def _suffix(group: Sequence[ManagedParameter]) -> str:
    # All that parameters of one module are divided by: no two of its units have the same.
    frozen = "" if group[0].original.requires_grad else ", frozen"
    return f"[{str(group[0].original.dtype).removeprefix('torch.')}{frozen}]"


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
