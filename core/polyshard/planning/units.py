"""Planned modules laid out: what each unit will be, and everything that plugins say about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigError
from ..events import Events
from ..interfaces import (
    InputCast,
    LinearForm,
    Observer,
    OffloadManager,
    OutputCast,
    PrecisionCaster,
    UnitDtypes,
    UnitSpec,
    WireSpec,
)
from ..registry import Constructed
from .answers import callable_or_none, dtypes_of, is_packed, parked_of, wire_of, yes_or_no
from .forms import forms_in, split_by_caster
from .groups import PlannedRanks
from .layout import FlatLayout, rows_layout
from .plan import ManagedParameter, ModuleParameters, modules_called

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False, slots=True)
class PlannedUnit:
    """A unit before any memory is taken for it."""

    parameters: tuple[ManagedParameter, ...]
    """In the order of ``layout``."""
    spec: UnitSpec
    layout: FlatLayout
    dtypes: UnitDtypes
    wire: WireSpec | None
    """How it travels; None for as it computes."""
    forms: tuple[LinearForm, ...]
    """How linear layers compute with what a gather brings, one a segment; empty where they compute in a dtype."""
    observers: tuple[Observer, ...]
    ranks: PlannedRanks
    launch_numel: int
    """Elements by which launches of communication are planned: the same on all ranks, whichever part they hold."""
    parked: bool = False
    """Whether the offload manager keeps its master and gradient; ``decide_parking`` says."""

    @property
    def is_cut(self) -> bool:
        """Whether each of several ranks keeps a part of it."""
        return self.ranks.shards > 1

    @property
    def gathered_nbytes_per_rank(self) -> int:
        """Bytes that each rank sends in a gather."""
        if self.forms:
            return sum(sum(form.lanes) for form in self.forms)
        return (
            self.layout.shard_numel * self.dtypes.compute.itemsize if self.wire is None else self.wire.nbytes_per_rank
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModule(ModuleParameters):
    """A planned module with its units, before any memory is taken for them.

    Plugins were asked everything about it, and their answers checked: only memory, and ``OffloadManager.place``, can
    fail from here on.
    """

    caster: PrecisionCaster
    """As ``offload`` the model's, or the one that its policy named for it."""
    offload: OffloadManager
    named: Mapping[str, Constructed[Any]]
    """The plugins that the policy named, by setting."""
    ranks: PlannedRanks
    """Of its buffers, and of its units but for those with a mesh of their own."""
    units: tuple[PlannedUnit, ...]
    """At least one for each of ``groups``, which a caster may divide."""
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them alone."""
    input_cast: InputCast | None
    output_cast: OutputCast | None
    full_precision_in_eval: bool
    reads_in_backward: bool
    """Whether its units are gathered in backward."""

    @property
    def placed_parameters(self) -> Iterator[tuple[PlannedUnit, ManagedParameter]]:
        """All of its parameters, each with its unit."""
        return ((unit, parameter) for unit in self.units for parameter in unit.parameters)

    @property
    def parks(self) -> bool:
        return any(unit.parked for unit in self.units)

    @property
    def has_meta_parameters(self) -> bool:
        return any(parameter.original.is_meta for _, parameter in self.placed_parameters)


def plan_units(
    planned: ModuleParameters,
    caster: PrecisionCaster,
    offload: OffloadManager,
    named: Mapping[str, Constructed[Any]],
    ranks_of: Callable[[DeviceMesh | None], PlannedRanks],
    device: torch.device,
    events: Events,
    travelled: dict[torch.dtype, int],
    *,
    is_root: bool,
    rank: int,
    reads: bool,
) -> PlannedModule:
    """Lay out the units of ``planned``, and ask plugins everything there is to ask.

    Args:
        planned: A module and the parameters that it owns.
        caster, offload, named: As in ``PlannedModule``.
        ranks_of: The ranks of its units by the mesh that these have of their own, or None.
        device: The device that computes.
        events: The listeners.
        travelled: Bytes in which an element of a dtype travelled in the modules planned before; updated.
        is_root: Whether it is the outermost module, or split off that.
        rank: Of this process, for messages.
        reads: Whether they are gathered in backward.

    Raises:
        PluginContractError: a plugin answered what its contract does not allow.
        ConfigError: of ``ranks_of``, or a parameter is cut along a dimension that the ranks do not divide.
    """
    of_module = ranks_of(None)
    units: list[PlannedUnit] = []
    unsized = UnitSpec(planned.name, type(planned.governing), (), 0, 0, planned.dtype, device, is_root)
    for group in (part for each in planned.groups for part in split_by_caster(planned, each, caster, unsized, rank)):
        ranks = of_module if group[0].mesh is None else ranks_of(group[0].mesh)
        if group[0].replicated:
            ranks = dataclasses.replace(ranks, lists=ranks.lists.whole(), post_forward_size=None)
        suffix = _suffix(group, ranks.lists.label) if units else ""
        _refuse_uneven(group, ranks.shards, rank)
        tensors, dims = [each.original for each in group], [each.dim for each in group]
        # Alignment follows from what travels, which the caster tells from a spec. Most units travel as the one before
        # them: a layout for that saves laying out twice.
        dtype = group[0].original.dtype
        itemsize = 1 if group[0].formed else travelled.get(dtype, dtype.itemsize)
        flat = rows_layout(tensors, dims, shards=ranks.shards, itemsize=itemsize)
        packed = group[0].packed is not None
        spec = _spec(planned, group, flat, device, suffix, is_root, ranks.lists.label)
        dtypes = dtypes_of(caster, spec, rank, packed=packed)
        travels = min(dtypes.compute.itemsize, dtypes.wire.itemsize)
        if group[0].formed:
            # Bytes, whatever they mean.
            travels = 1
        else:
            travelled[dtype] = travels
        if travels != itemsize:
            flat = rows_layout(tensors, dims, shards=ranks.shards, itemsize=travels)
            spec = _spec(planned, group, flat, device, suffix, is_root, ranks.lists.label)
        forms = forms_in(caster, spec, flat, dtypes.compute, rank) if group[0].formed else ()
        as_it_is = ranks.shards == 1 or bool(forms) or group[0].extended or packed or is_packed(dtype)
        wire = None if as_it_is else wire_of(caster, spec, rank)
        # Asked again when the unit is built: a caster that cannot answer must say so while the model is whole.
        _full_precision_in_eval(caster, spec, rank)
        observers = events.observers(spec) if events.active else ()
        launched = _launch_numel(group, flat)
        units.append(PlannedUnit(tuple(group), spec, flat, dtypes, wire, forms, observers, ranks, launched))
    plain = (unit for unit in units if unit.parameters[0].packed is None and not is_packed(unit.spec.master_dtype))
    computing = next(plain, None)
    if computing is not None:
        first, buffer_dtype = computing.spec, computing.dtypes.buffer
    else:
        first = unsized
        buffer_dtype = dtypes_of(caster, first, rank).buffer
    for unit in units:
        _refuse_narrow_batch_norms(unit.parameters, unit.dtypes.compute, buffer_dtype, rank)
    # A split module's inputs and outputs stay inside the module around it.
    casts = planned.parent is None
    return PlannedModule(
        *(getattr(planned, field.name) for field in dataclasses.fields(planned)),
        caster=caster,
        offload=offload,
        named=named,
        ranks=of_module,
        units=tuple(units),
        buffer_dtype=buffer_dtype,
        input_cast=callable_or_none(caster, "input_cast", first, rank) if casts else None,
        output_cast=callable_or_none(caster, "output_cast", first, rank) if casts else None,
        full_precision_in_eval=_full_precision_in_eval(caster, first, rank),
        reads_in_backward=reads,
    )


def _refuse_uneven(group: Sequence[ManagedParameter], shards: int, rank: int) -> None:
    for each in group:
        shape = tuple(each.original.shape)
        if each.dim and shape[each.dim] % shards:
            raise ConfigError(
                f"A wrap policy places '{each.names[0]}' (rank {rank}), of shape {shape}, along dimension {each.dim}, "
                f"which {shards} ranks do not divide evenly. Give a dimension that they divide, or 0."
            )


def _refuse_narrow_batch_norms(
    members: Sequence[ManagedParameter], compute: torch.dtype, buffer_dtype: torch.dtype | None, rank: int
) -> None:
    """Raise ConfigError for a batch norm whose statistics are in another dtype than it computes in: torch cannot."""
    for parameter in members:
        module, _ = parameter.sites[0]
        mean = module._buffers.get("running_mean") if type(module).forward is nn.BatchNorm1d.forward else None
        statistics = compute if mean is None else buffer_dtype or mean.dtype
        if statistics != compute:
            kind = type(module)
            raise ConfigError(
                f"'{parameter.names[0]}' would compute in {compute} (rank {rank}), but the statistics of its "
                f"{kind.__name__} are in {statistics}, and torch wants one dtype. Leave it as it is, by "
                f"leave_alone=['{kind.__module__}:{kind.__name__}'] of the precision, or by a fully_shard call of its "
                "own without param_dtype."
            )


def decide_parking(plans: Sequence[PlannedModule], rank: int) -> None:
    """Mark each unit of ``plans``, of one model in its order, that its offload manager parks.

    A manager is asked once, of all the units that it serves.

    Raises PluginContractError: a manager answered what its contract does not allow.
    """
    served: dict[int, tuple[OffloadManager, list[PlannedUnit]]] = {}
    for plan in plans:
        served.setdefault(id(plan.offload), (plan.offload, []))[1].extend(plan.units)
    for manager, units in served.values():
        parked = parked_of(manager, tuple(unit.spec for unit in units), rank)
        for unit in units:
            unit.parked = unit.spec in parked


def reads_in_backward(module: nn.Module) -> bool:
    """Whether its backward may need whole parameters: torch's embedding makes its gradient from indices alone.

    Asked at the wrap, and compared by ranks: what one rank gathers all of them gather.
    """
    return any(
        # Of a subclass too, unless it computes otherwise.
        type(each).forward is not nn.Embedding.forward
        or "forward" in each.__dict__
        # They may compute with the weight.
        or bool(each._forward_hooks or each._forward_pre_hooks)
        for each in modules_called(module)
    )


def _full_precision_in_eval(caster: PrecisionCaster, unit: UnitSpec, rank: int) -> bool:
    answer = caster.full_precision_in_eval(unit)
    return yes_or_no(caster, "full_precision_in_eval", answer, f"unit '{unit.label}'", rank)


def _launch_numel(group: Sequence[ManagedParameter], flat: FlatLayout) -> int:
    parts = [parameter.part for parameter in group]
    if all(part is None or part.is_even for part in parts):
        return flat.padded_numel
    pairs = zip(parts, group, strict=True)
    return sum(each.original.numel() if part is None else part.largest_numel for part, each in pairs)


def _spec(
    planned: ModuleParameters,
    group: Sequence[ManagedParameter],
    flat: FlatLayout,
    device: torch.device,
    suffix: str,
    is_root: bool,
    ranks: str,
) -> UnitSpec:
    return UnitSpec(
        name=f"{planned.name}{suffix}",
        module_class=type(planned.governing),
        parameter_names=tuple(parameter.names[0] for parameter in group),
        numel=flat.padded_numel,
        shard_numel=flat.shard_numel,
        master_dtype=group[0].original.dtype,
        device=device,
        is_root=is_root,
        suffix=suffix,
        trained=group[0].original.requires_grad,
        keeps_dtype=group[0].keeps_dtype,
        ranks=ranks,
    )


def _suffix(group: Sequence[ManagedParameter], ranks: str) -> str:
    # All that parameters of one module are divided by: no two of its units have the same.
    frozen = "" if group[0].original.requires_grad else ", frozen"
    kinds = {
        "extended": group[0].extended,
        "formed": group[0].formed,
        "kept": group[0].keeps_dtype,
        "packed": group[0].packed is not None,
        "replicated": group[0].replicated,
    }
    kind = "".join(f", {name}" for name, holds in kinds.items() if holds)
    kind += f", over {ranks or 'a mesh of its own'}" if group[0].mesh is not None else ""
    return f"[{str(group[0].original.dtype).removeprefix('torch.')}{frozen}{kind}]"
