"""A planned module state laid out: what each of its units will be, and all that plugins say about it."""

from __future__ import annotations

import dataclasses
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
    ParameterGeometry,
    PrecisionCaster,
    UnitDtypes,
    UnitGeometry,
    UnitSpec,
    WireSpec,
)
from .answers import callable_or_none, dtypes_of, full_precision_in_eval_of, parked_of, wire_of
from .layout import FlatLayout, NamedLayout, dense_stride
from .plan import ManagedParameter, PlannedModule


@dataclass(frozen=True, slots=True)
class DraftedUnit:
    """What a unit will be, with everything that plugins say about it."""

    spec: UnitSpec
    layout: FlatLayout
    dtypes: UnitDtypes
    wire: WireSpec | None
    observers: tuple[Observer, ...]
    parked: bool
    """Whether the manager keeps its master and gradient."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What a module state will be, before any memory is taken for it. Which units are parked, ``decide_parking`` adds.

    Everything that plugins say about it was asked and checked: from here on only memory can fail, and ``place``.
    """

    module_state: PlannedModule
    modules: tuple[nn.Module, ...]
    """The modules inside the module state's that no inner module state owns."""
    caster: PrecisionCaster
    offload: OffloadManager
    layout: NamedLayout
    units: tuple[DraftedUnit, ...]
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them alone."""
    input_cast: InputCast | None
    output_cast: OutputCast | None
    full_precision_in_eval: bool
    reads_in_backward: bool
    """Whether its units are gathered in backward."""

    @property
    def parks(self) -> bool:
        """Whether any of its units is parked."""
        return any(unit.parked for unit in self.units)

    @property
    def has_meta_parameters(self) -> bool:
        """Whether any of its parameters has no values yet."""
        return any(parameter.original.is_meta for group in self.module_state.groups for parameter in group)


def draft_module_state(
    module_state: PlannedModule,
    modules: Sequence[nn.Module],
    shards: int,
    device: torch.device,
    caster: PrecisionCaster,
    offload: OffloadManager,
    layout: NamedLayout,
    events: Events,
    travelled: dict[torch.dtype, int],
    *,
    is_root: bool,
    rank: int,
) -> Draft:
    """Lay out the units of ``module_state`` for so many ``shards``, and ask plugins all there is to ask.

    ``travelled``, of the module states before and then of this one too: bytes in which an element of a dtype travelled last.

    Raises:
        PluginContractError: a plugin answered what its contract does not allow.
    """
    units: list[DraftedUnit] = []
    groups: list[tuple[ManagedParameter, ...]] = []
    for group in module_state.groups:
        suffix = _suffix(group) if units else ""
        # Alignment follows from what travels, which the caster tells from a spec. Most units travel as the one before
        # them: a layout for that saves asking, checking and laying out twice.
        dtype = group[0].original.dtype
        itemsize = travelled.get(dtype, dtype.itemsize)
        geometry = _geometry(module_state, group, suffix, shards, itemsize)
        buffers = layout.arrange(geometry, rank)
        dtypes = dtypes_of(caster, _spec(module_state, group, buffers[0][1], device, suffix, is_root), rank)
        travels = min(dtypes.compute.itemsize, dtypes.wire.itemsize)
        travelled[dtype] = travels
        if travels != itemsize:
            buffers = layout.arrange(dataclasses.replace(geometry, itemsize=travels), rank)
        for number, (order, flat) in enumerate(buffers):
            members = tuple(group[index] for index in order)
            spec = _spec(module_state, members, flat, device, _numbered(group, number) if number else suffix, is_root)
            wire = wire_of(caster, spec, rank) if shards > 1 else None
            # Asked again when the unit is built: a caster that cannot answer must say so while the model is whole.
            full_precision_in_eval_of(caster, spec, rank)
            observers = events.observers(spec) if events.active else ()
            own = dtypes if len(buffers) == 1 else dtypes_of(caster, spec, rank)
            units.append(DraftedUnit(spec, flat, own, wire, observers, parked=False))
            groups.append(members)
    if units:
        first, buffer_dtype = units[0].spec, units[0].dtypes.buffer
    else:
        first = UnitSpec(module_state.name, type(module_state.governing), (), 0, 0, module_state.dtype, device, is_root)
        buffer_dtype = dtypes_of(caster, first, rank).buffer
    # What a part takes and returns stays inside its host.
    casts = module_state.parent is None
    return Draft(
        dataclasses.replace(module_state, groups=tuple(groups)),
        tuple(modules),
        caster,
        offload,
        layout,
        tuple(units),
        buffer_dtype,
        callable_or_none(caster, "input_cast", first, rank) if casts else None,
        callable_or_none(caster, "output_cast", first, rank) if casts else None,
        full_precision_in_eval_of(caster, first, rank),
        reads_in_backward(module_state.module),
    )


def reads_in_backward(module: nn.Module) -> bool:
    """Whether its backward may need whole parameters: torch's embedding makes its gradient from indices alone.

    Asked at the wrap, and compared by ranks: what one rank gathers all of them gather.
    """
    return (
        # Of a subclass too, unless it computes otherwise.
        type(module).forward is not nn.Embedding.forward
        or module.max_norm is not None
        or "forward" in module.__dict__
        # They may compute with the weight.
        or bool(module._forward_hooks or module._forward_pre_hooks)
    )


def _spec(
    module_state: PlannedModule,
    group: Sequence[ManagedParameter],
    flat: FlatLayout,
    device: torch.device,
    suffix: str,
    is_root: bool,
) -> UnitSpec:
    return UnitSpec(
        name=f"{module_state.name}{suffix}",
        module_class=type(module_state.governing),
        parameter_names=tuple(parameter.names[0] for parameter in group),
        numel=flat.padded_numel,
        shard_numel=flat.shard_numel,
        master_dtype=group[0].original.dtype,
        device=device,
        is_root=is_root,
        suffix=suffix,
        trained=group[0].original.requires_grad,
    )


def _geometry(
    module_state: PlannedModule, group: Sequence[ManagedParameter], suffix: str, shards: int, itemsize: int
) -> UnitGeometry:
    parameters = []
    for each in group:
        shape = tuple(each.original.shape)
        stride = dense_stride(shape, each.original.stride())
        parameters.append(
            ParameterGeometry(each.names[0], shape, stride, each.original.dtype, each.original.requires_grad)
        )
    return UnitGeometry(f"{module_state.name or '(root)'}{suffix}", tuple(parameters), shards, itemsize)


def _suffix(group: Sequence[ManagedParameter]) -> str:
    # All that parameters of one module are divided by: no two of its units have the same.
    return f"[{_kind(group)}]"


def _numbered(group: Sequence[ManagedParameter], number: int) -> str:
    # Where the layout wants several buffers for them.
    return f"[{_kind(group)}, {number + 1}]"


def _kind(group: Sequence[ManagedParameter]) -> str:
    frozen = "" if group[0].original.requires_grad else ", frozen"
    return f"{str(group[0].original.dtype).removeprefix('torch.')}{frozen}"


# Which units are parked: asked of each offload manager once, of all the units that it serves.


def decide_parking(drafts: Sequence[Draft], rank: int) -> tuple[Draft, ...]:
    """``drafts``, of one model in its order, with each unit marked that its manager parks.

    Raises:
        PluginContractError: a manager answered what its contract does not allow.
    """
    served: dict[int, tuple[OffloadManager, list[UnitSpec]]] = {}
    for draft in drafts:
        served.setdefault(id(draft.offload), (draft.offload, []))[1].extend(unit.spec for unit in draft.units)
    parked = {key: parked_of(manager, tuple(specs), rank) for key, (manager, specs) in served.items()}
    return tuple(_marked(draft, parked[id(draft.offload)]) for draft in drafts)


def _marked(draft: Draft, parked: frozenset[UnitSpec]) -> Draft:
    if not parked:
        return draft
    units = tuple(dataclasses.replace(unit, parked=unit.spec in parked) for unit in draft.units)
    return dataclasses.replace(draft, units=units)
