"""A planned stage laid out, and from there its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..events import Events
from ..interfaces import (
    InputCast,
    Observer,
    OffloadManager,
    OutputCast,
    PrecisionCaster,
    UnitDtypes,
    UnitSpec,
    WireSpec,
)
from . import _torch_private
from .answers import callable_or_none, dtypes_of, full_precision_in_eval_of, place, wire_of
from .layout import FlatLayout, plan_layout
from .lent import LendingParameters
from .originals import ManagedParameter
from .plan import PlannedStage
from .ranks import RankGrid
from .unit import Reshard, Unit


@dataclass(frozen=True, slots=True)
class DraftedUnit:
    """What a unit will be, with everything that plugins say about it."""

    spec: UnitSpec
    layout: FlatLayout
    dtypes: UnitDtypes
    wire: WireSpec | None
    observers: tuple[Observer, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a stage will be, before any memory is taken for it.

    Everything that plugins say about it was asked and checked: from here on only memory can fail, and ``place``.
    """

    stage: PlannedStage
    modules: tuple[nn.Module, ...]
    """The modules inside the stage's that no inner stage owns."""
    caster: PrecisionCaster
    offload: OffloadManager
    units: tuple[DraftedUnit, ...]
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them alone."""
    input_cast: InputCast | None
    output_cast: OutputCast | None
    full_precision_in_eval: bool

    @property
    def has_meta_parameters(self) -> bool:
        """Whether any of its parameters has no values yet."""
        return any(parameter.original.is_meta for group in self.stage.groups for parameter in group)


def draft_stage(
    stage: PlannedStage,
    modules: Sequence[nn.Module],
    shards: int,
    device: torch.device,
    caster: PrecisionCaster,
    offload: OffloadManager,
    events: Events,
    *,
    is_root: bool,
    rank: int,
) -> Draft:
    """Lay out the units of ``stage`` for so many ``shards``, and ask plugins all there is to ask.

    Raises:
        PluginContractError: a plugin answered what its contract does not allow.
    """
    units: list[DraftedUnit] = []
    for group in stage.groups:
        suffix = _suffix(group) if units else ""
        shapes = [tuple(parameter.original.shape) for parameter in group]
        strides = [parameter.original.stride() for parameter in group]
        # Alignment follows from what travels, which the caster tells from a spec: ask with the master's layout first.
        itemsize = group[0].original.dtype.itemsize
        layout = plan_layout(shapes, strides, world_size=shards, itemsize=itemsize)
        spec = _spec(stage, group, layout, device, suffix, is_root)
        dtypes = dtypes_of(caster, spec, rank)
        travels = min(dtypes.compute.itemsize, dtypes.wire.itemsize)
        if travels != itemsize:
            layout = plan_layout(shapes, strides, world_size=shards, itemsize=travels)
            spec = _spec(stage, group, layout, device, suffix, is_root)
        wire = wire_of(caster, spec, rank) if shards > 1 else None
        # Asked again when the unit is built: a caster that cannot answer must say so while the model is whole.
        full_precision_in_eval_of(caster, spec, rank)
        observers = events.observers(spec) if events.active else ()
        units.append(DraftedUnit(spec, layout, dtypes, wire, observers))
    if units:
        first, buffer_dtype = units[0].spec, units[0].dtypes.buffer
    else:
        first = UnitSpec(stage.name, type(stage.governing), (), 0, 0, stage.dtype, device, is_root)
        buffer_dtype = dtypes_of(caster, first, rank).buffer
    # What a part takes and returns stays inside its host.
    casts = stage.host is None
    return Draft(
        stage,
        tuple(modules),
        caster,
        offload,
        tuple(units),
        buffer_dtype,
        callable_or_none(caster, "input_cast", first, rank) if casts else None,
        callable_or_none(caster, "output_cast", first, rank) if casts else None,
        full_precision_in_eval_of(caster, first, rank),
    )


def park(draft: Draft, masters: list[torch.Tensor] | None, grid: RankGrid, device: torch.device) -> list[torch.Tensor]:
    """The parked masters of one stage whose manager parks; the model stays as it is.

    ``masters``: emptied; None where the parameters hold the values.

    Raises:
        PluginContractError: ``place`` returned what no parameter can view.
    """
    if masters is not None:
        # Let go of one by one: the manager makes its own copy of each.
        masters.reverse()
    parked = []
    for unit, group in zip(draft.units, draft.stage.groups, strict=True):
        shard = masters.pop() if masters is not None else _cut(group, unit.layout, grid, device)
        parked.append(place(draft.offload, unit.spec, shard, grid.world.rank))
    return parked


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
