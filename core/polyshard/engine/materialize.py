"""From a planned stage to units: lays parameters out, materialises meta tensors, cuts, and lets go of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..errors import ParameterError
from ..interfaces import OffloadManager, PrecisionCaster, UnitSpec
from .buffer import view_of
from .layout import FlatLayout, plan_layout
from .originals import ManagedParameter
from .plan import PlannedStage
from .ranks import RankGrid
from .unit import Reshard, Unit

#: Initialises the parameters and buffers that a module holds directly.
Initializer = Callable[[nn.Module], None]


def refuse_uninitializable(
    stages: Iterable[PlannedStage], modules: Iterable[nn.Module], initializer: Initializer | None, rank: int
) -> None:
    """Raise if a module that holds meta parameters or buffers could not be initialised.

    Raises:
        ParameterError: naming the tensors and their modules.
    """
    if initializer is not None:
        return
    held = [
        (parameter.names[0], module)
        for stage in stages
        for group in stage.groups
        for parameter in group
        if parameter.original.is_meta
        for module, _ in parameter.sites
    ]
    held += [(key, module) for module in modules for key, buffer in module._buffers.items() if _is_meta(buffer)]
    missing = sorted(
        {
            f"{name} ({type(module).__name__})"
            for name, module in held
            if not callable(getattr(module, "reset_parameters", None))
        }
    )
    if missing:
        raise ParameterError(
            "Parameters or buffers are on the meta device and their modules have no reset_parameters(): "
            f"{', '.join(missing)} (rank {rank}). Give the modules a reset_parameters() method, or pass initializer=."
        )


def _is_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta


def build_units(
    stage: PlannedStage,
    grid: RankGrid,
    device: torch.device,
    caster: PrecisionCaster,
    offload: OffloadManager,
    *,
    reshard: Reshard,
    initializer: Initializer | None,
    is_root: bool,
    modules: Sequence[nn.Module],
    whole_shapes: Mapping[nn.Parameter, tuple[int, ...]],
) -> list[Unit]:
    """The units of one stage.

    Memory on ``device`` grows by this rank's shards, and for meta parameters by one whole stage until they are cut.
    Values are read from the parameters where they are; only this rank's elements move. ``modules``: those of the stage,
    whose meta buffers are materialised too. ``whole_shapes``: of every parameter of the model, since those of other
    stages may be cut already.
    """
    layouts, specs = [], []
    for group in stage.groups:
        layout = _layout(group, grid, caster, stage, device, is_root)
        layouts.append(layout)
        specs.append(_spec(stage, group, layout, device, is_root))
    hollow = [module for module in modules if any(_is_meta(buffer) for buffer in module._buffers.values())]
    if any(parameter.original.is_meta for group in stage.groups for parameter in group):
        masters = _materialize(stage, layouts, grid, device, hollow, initializer, whole_shapes)
    else:
        masters = [_cut(group, layout, grid, device) for group, layout in zip(stage.groups, layouts, strict=True)]
        with torch.no_grad():
            for module in hollow:
                place_buffers(module, device, None)
                _initialize(module, set(), initializer, whole_shapes)
    # Taken from the end and let go of one by one: an offload manager makes its own copy of each.
    masters.reverse()
    return [
        Unit(
            spec,
            layout,
            group,
            grid,
            masters.pop(),
            caster.dtypes(spec),
            caster,
            offload,
            reshard=reshard if grid.shard is not None else Reshard.NEVER,
        )
        for spec, layout, group in zip(specs, layouts, stage.groups, strict=True)
    ]


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


def _spec(
    stage: PlannedStage,
    group: Sequence[ManagedParameter],
    layout: FlatLayout,
    device: torch.device,
    is_root: bool,
) -> UnitSpec:
    return UnitSpec(
        name=stage.name,
        module_class=type(stage.module),
        parameter_names=tuple(parameter.names[0] for parameter in group),
        numel=layout.padded_numel,
        shard_numel=layout.shard_numel,
        master_dtype=group[0].original.dtype,
        device=device,
        is_root=is_root,
    )


def _layout(
    group: Sequence[ManagedParameter],
    grid: RankGrid,
    caster: PrecisionCaster,
    stage: PlannedStage,
    device: torch.device,
    is_root: bool,
) -> FlatLayout:
    shapes = [tuple(parameter.original.shape) for parameter in group]
    strides = [parameter.original.stride() for parameter in group]
    # Dtypes may depend on the unit's name and class, but alignment on dtypes: ask with the layout for the master's
    # dtype first, and lay out again for what travels.
    itemsize = group[0].original.dtype.itemsize
    layout = plan_layout(shapes, strides, world_size=grid.shard_size, itemsize=itemsize)
    dtypes = caster.dtypes(_spec(stage, group, layout, device, is_root))
    travels = min(dtypes.compute.itemsize, dtypes.wire.itemsize)
    if travels == itemsize:
        return layout
    return plan_layout(shapes, strides, world_size=grid.shard_size, itemsize=travels)


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


def _materialize(
    stage: PlannedStage,
    layouts: Sequence[FlatLayout],
    grid: RankGrid,
    device: torch.device,
    hollow: Sequence[nn.Module],
    initializer: Initializer | None,
    whole_shapes: Mapping[nn.Parameter, tuple[int, ...]],
) -> list[torch.Tensor]:
    flats: list[torch.Tensor] = []
    fresh: dict[nn.Module, None] = dict.fromkeys(hollow)
    held: list[tuple[nn.Module, str, Any]] = []
    with torch.inference_mode(False), torch.no_grad():
        # Before the whole stage's memory, not behind it: the heap then gives that memory back, instead of keeping a hole
        # as large as a stage in front of every shard.
        masters = [
            torch.empty(layout.shard_numel if grid.shard else 0, dtype=group[0].original.dtype, device=device)
            for group, layout in zip(stage.groups, layouts, strict=True)
        ]
        for group, layout in zip(stage.groups, layouts, strict=True):
            flat = torch.empty(layout.padded_numel, dtype=group[0].original.dtype, device=device)
            for offset, numel in layout.gaps():
                flat.narrow(0, offset, numel).zero_()
            flats.append(flat)
            for parameter, slot in zip(group, layout.slots, strict=True):
                whole = nn.Parameter(
                    view_of(flat, slot.shape, slot.stride, slot.offset), requires_grad=parameter.original.requires_grad
                )
                if parameter.original.is_meta:
                    fresh.update(dict.fromkeys(module for module, _ in parameter.sites))
                else:
                    whole.copy_(parameter.original)
                for module, key in parameter.sites:
                    held.append((module, key, parameter.original))
                    module._parameters[key] = whole
        mine = {(module, key) for module, key, _ in held}
        try:
            for module in fresh:
                place_buffers(module, device, None)
                _initialize(module, mine, initializer, whole_shapes)
            for group, layout, flat in zip(stage.groups, layouts, flats, strict=True):
                _collect_replaced(group, layout, flat)
        finally:
            for module, key, original in held:
                module._parameters[key] = original
        if grid.shard is None:
            return flats
        for master, layout, flat in zip(masters, layouts, flats, strict=True):
            master.copy_(flat.narrow(0, grid.shard_rank * layout.shard_numel, layout.shard_numel))
        return masters


def _initialize(
    module: nn.Module,
    mine: set[tuple[nn.Module, str]],
    initializer: Initializer | None,
    whole_shapes: Mapping[nn.Parameter, tuple[int, ...]],
) -> None:
    # A parameter of the module that belongs to another stage is sharded already, or not there yet: initialising must
    # see its shape and not touch its values.
    others = {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and (module, key) not in mine
    }
    for key, parameter in others.items():
        shape = whole_shapes.get(parameter, tuple(parameter.shape))
        stand_in = torch.empty(shape, dtype=parameter.dtype, device="meta")
        module._parameters[key] = nn.Parameter(stand_in, requires_grad=False)
    try:
        if initializer is not None:
            initializer(module)
        else:
            cast("Callable[[], None]", module.reset_parameters)()
    finally:
        module._parameters.update(others)


def _collect_replaced(group: Sequence[ManagedParameter], layout: FlatLayout, flat: torch.Tensor) -> None:
    # An initialiser may assign new parameters instead of filling the ones that are there.
    for parameter, slot in zip(group, layout.slots, strict=True):
        module, key = parameter.sites[0]
        current = module._parameters[key]
        whole = view_of(flat, slot.shape, slot.stride, slot.offset)
        if current is not None and not current.is_meta and current.data_ptr() != whole.data_ptr():
            whole.copy_(current)
