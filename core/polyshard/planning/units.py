"""Planned modules laid out: what each unit will be, and everything that plugins say about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from .. import registry
from ..config import PluginChoice
from ..errors import ConfigError, UnsupportedError
from ..events import Events
from ..interfaces import (
    Collectives,
    FormedWeights,
    GatherEncoding,
    Group,
    InputCast,
    LinearForm,
    Observer,
    OffloadManager,
    OutputCast,
    PluginContext,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
    WrapPolicy,
)
from .answers import (
    callable_or_none,
    dtypes_of,
    encoding_of,
    form_of,
    is_packed,
    offloaded_units,
    refuse_unable,
    yes_or_no,
)
from .groups import ModelRanks, PlannedRanks
from .layout import FlatLayout, contiguous_stride, rows_layout
from .meshes import WorldMesh, refuse_overlap
from .plan import ManagedParameter, ModuleParameters, modules_called


@dataclass(frozen=True, slots=True)
class ChosenPlugins:
    """What a configuration's names stand for."""

    context: PluginContext
    collectives: Collectives
    precision: PrecisionPlugin
    offload: OffloadManager
    policy: WrapPolicy
    events: Events
    used: tuple[registry.Constructed, ...]
    """All of them, the collectives first."""
    collectives_choice: object
    """The options of the collectives, or the object that the user gave: equal where two instances could be one."""
    mesh: WorldMesh | None
    """All ranks, by the dimensions of their mesh; None where all of them shard the same."""

    def override(self, group: Group, choice: PluginChoice) -> registry.Constructed:
        """The plugin that a policy names for one unit, constructed; raises what a configuration's would."""
        return registry.construct(registry.resolve(group, choice), self.context)

    def summary(self) -> str:
        return ", ".join(f"{each.resolved.group.value} {registry.used(each)}" for each in self.used)


@dataclass(eq=False, slots=True)
class PlannedUnit:
    """A unit before any memory is taken for it."""

    parameters: tuple[ManagedParameter, ...]
    """In the order of ``layout``."""
    spec: UnitSpec
    layout: FlatLayout
    dtypes: UnitDtypes
    encoding: GatherEncoding | None
    """How it travels; None for as it computes."""
    forms: tuple[LinearForm, ...]
    """How linear layers compute with what a gather brings, one a segment; empty where they compute in a dtype."""
    observers: tuple[Observer, ...]
    ranks: PlannedRanks
    launch_numel: int
    """Elements by which launches of communication are planned: the same on all ranks, whichever part they hold."""
    offloaded: bool = False
    """Whether the offload manager keeps its master and gradient; its manager says."""

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
            self.layout.shard_numel * self.dtypes.compute.itemsize
            if self.encoding is None
            else self.encoding.nbytes_per_rank
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModule(ModuleParameters):
    """A planned module with its units, before any memory is taken for them.

    Plugins were asked everything about it, and their answers checked: only memory, and ``OffloadManager.place``, can
    fail from here on.
    """

    precision: PrecisionPlugin
    """As ``offload`` the model's, or the one that its policy named for it."""
    offload: OffloadManager
    named: Mapping[str, registry.Constructed]
    """The plugins that the policy named, by setting."""
    ranks: PlannedRanks
    """Of its buffers, and of its units but for those with a mesh of their own."""
    units: tuple[PlannedUnit, ...]
    """At least one for each of ``groups``, which a precision plugin may divide."""
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them alone."""
    input_cast: InputCast | None
    output_cast: OutputCast | None
    full_precision_in_eval: bool
    reads_in_backward: bool
    """Whether its units are gathered in backward."""

    @property
    def placed_parameters(self) -> Iterator[tuple[PlannedUnit, ManagedParameter]]:
        return ((unit, parameter) for unit in self.units for parameter in unit.parameters)

    @property
    def offloads(self) -> bool:
        return any(unit.offloaded for unit in self.units)

    @property
    def has_meta_parameters(self) -> bool:
        return any(parameter.original.is_meta for _, parameter in self.placed_parameters)


#: The plugins that a policy may name for a unit.
_OVERRIDDEN = {"precision": Group.PRECISION, "offload": Group.OFFLOAD}


def plan_units(
    owners: Sequence[ModuleParameters], plugins: ChosenPlugins, ranks: ModelRanks
) -> tuple[PlannedModule, ...]:
    """Lay out the units of ``owners``, all of a model in its order, and ask plugins everything there is to ask.

    Raises:
        PluginContractError: a plugin answered what its contract does not allow.
        ConfigError, ParameterError, UnsupportedError: ranks, mesh or plugins of a unit do not fit its parameters.
    """
    rank = plugins.collectives.rank
    # Bytes in which an element of a dtype travelled in the modules planned before.
    travelled: dict[torch.dtype, int] = {}
    planned = [_planned(owner, plugins, ranks, travelled) for owner in owners]
    served: dict[int, tuple[OffloadManager, list[PlannedUnit]]] = {}
    for each in planned:
        served.setdefault(id(each.offload), (each.offload, []))[1].extend(each.units)
        for unit, parameter in each.placed_parameters:
            if parameter.part is None:
                continue
            if ranks.mesh is None:
                raise ConfigError(
                    f"The parameter '{parameter.names[0]}' is a DTensor, and the configuration has no mesh that would "
                    "tell over which other ranks to shard it. Give it: ShardConfig(mesh=mesh, shard='dp'), of a mesh "
                    "with the DTensor's dimensions and those to shard over."
                )
            refuse_overlap(unit.ranks.lists, parameter.part.mesh, ranks.mesh, parameter.names[0])
    # A manager is asked once, of all the units that it serves.
    for manager, units in served.values():
        offloaded = offloaded_units(manager, tuple(unit.spec for unit in units), rank)
        for unit in units:
            unit.offloaded = unit.spec in offloaded
    for each in planned:
        _refuse_beside_buffers(each, plugins.collectives)
        if ranks.routes:
            _refuse_unrouted(each, plugins.collectives)
    return tuple(planned)


def _planned(
    owner: ModuleParameters, plugins: ChosenPlugins, model: ModelRanks, travelled: dict[torch.dtype, int]
) -> PlannedModule:
    rank = plugins.collectives.rank
    named = {
        setting: plugins.override(group, owner.overrides[setting])
        for setting, group in _OVERRIDDEN.items()
        if setting in owner.overrides
    }
    precision = named["precision"].instance if "precision" in named else plugins.precision
    offload = named["offload"].instance if "offload" in named else plugins.offload
    refuse_unable(precision, rank)
    refuse_unable(offload, rank)
    reads = reads_in_backward(owner.module)
    of_module = model.of_unit(owner, None, rank, reads=reads)
    units: list[PlannedUnit] = []
    unsized = UnitSpec(
        owner.name,
        type(owner.governing),
        parameter_names=(),
        numel=0,
        shard_numel=0,
        master_dtype=owner.dtype,
        device=plugins.context.device,
        is_root=not owner.name or owner.parent is not None,
    )
    for group in (part for each in owner.groups for part in _split_by_precision(owner, each, precision, unsized, rank)):
        first = group[0]
        ranks = of_module if first.mesh is None else model.of_unit(owner, first.mesh, rank, reads=reads)
        if first.replicated:
            ranks = replace(ranks, lists=ranks.lists.whole, post_forward_size=None)
        suffix = _suffix(group, ranks.lists.label) if units else ""
        _refuse_uneven(group, ranks.shards, rank)
        tensors, dims = [each.original for each in group], [each.dim for each in group]
        # Alignment follows from what travels, which the precision plugin tells from a spec. Most units travel as the
        # one before them: a layout for that saves laying out twice.
        dtype = first.original.dtype
        itemsize = 1 if first.formed else travelled.get(dtype, dtype.itemsize)
        flat = rows_layout(tensors, dims, shards=ranks.shards, itemsize=itemsize)
        packed = first.packed is not None
        spec = replace(
            unsized,
            name=f"{owner.name}{suffix}",
            parameter_names=tuple(each.names[0] for each in group),
            numel=flat.padded_numel,
            shard_numel=flat.shard_numel,
            master_dtype=dtype,
            suffix=suffix,
            trained=first.original.requires_grad,
            keeps_dtype=first.keeps_dtype,
            ranks=ranks.lists.label,
        )
        dtypes = dtypes_of(precision, spec, rank, packed=packed)
        # Of formed ones bytes, whatever they mean.
        travels = 1 if first.formed else min(dtypes.compute.itemsize, dtypes.communication.itemsize)
        if not first.formed:
            travelled[dtype] = travels
        if travels != itemsize:
            flat = rows_layout(tensors, dims, shards=ranks.shards, itemsize=travels)
            spec = replace(spec, numel=flat.padded_numel, shard_numel=flat.shard_numel)
        forms = _forms_in(precision, spec, flat, dtypes.compute, rank) if first.formed else ()
        as_it_is = ranks.shards == 1 or bool(forms) or first.extended or packed or is_packed(dtype)
        encoding = None if as_it_is else encoding_of(precision, spec, rank)
        # Asked again when the unit is built: a plugin that cannot answer must say so while the model is whole.
        _full_precision_in_eval(precision, spec, rank)
        observers = plugins.events.observers(spec) if plugins.events.active else ()
        numels = [each.original.numel() if each.part is None else each.part.largest_numel for each in group]
        even = all(each.part is None or each.part.is_even for each in group)
        launched = flat.padded_numel if even else sum(numels)
        units.append(PlannedUnit(group, spec, flat, dtypes, encoding, forms, observers, ranks, launched))
    plain = (unit for unit in units if unit.parameters[0].packed is None and not is_packed(unit.spec.master_dtype))
    computing = next(plain, None)
    spec = unsized if computing is None else computing.spec
    buffer_dtype = (dtypes_of(precision, spec, rank) if computing is None else computing.dtypes).buffer
    for unit in units:
        _refuse_narrow_batch_norms(unit.parameters, unit.dtypes.compute, buffer_dtype, rank)
    # A split module's inputs and outputs stay inside the module around it.
    casts = owner.parent is None
    return PlannedModule(
        *(getattr(owner, field.name) for field in fields(owner)),
        precision=precision,
        offload=offload,
        named=named,
        ranks=of_module,
        units=tuple(units),
        buffer_dtype=buffer_dtype,
        input_cast=callable_or_none(precision, "input_cast", spec, rank) if casts else None,
        output_cast=callable_or_none(precision, "output_cast", spec, rank) if casts else None,
        full_precision_in_eval=_full_precision_in_eval(precision, spec, rank),
        reads_in_backward=reads,
    )


def _split_by_precision(
    owner: ModuleParameters, group: Sequence[ManagedParameter], precision: PrecisionPlugin, unit: UnitSpec, rank: int
) -> list[tuple[ManagedParameter, ...]]:
    """``group``, one of ``owner``, as up to three: parameters in the compute dtype, those that keep their own, and
    weights that ``precision`` forms.

    Weights of a module that was split off are not formed: other modules may compute with them.
    """
    # Most precision plugins answer neither question by themselves, and models have many parameters.
    keeps, forms = (
        getattr(getattr(precision, question), "__func__", None) is not getattr(PrecisionPlugin, question)
        for question in ("keeps_dtype", "forms")
    )
    parts: tuple[list[ManagedParameter], ...] = [], [], []
    for each in group:
        name, (module, attribute) = each.names[0], each.sites[0]
        each.keeps_dtype = keeps and yes_or_no(
            precision, "keeps_dtype", precision.keeps_dtype(unit, name), f"'{name}'", rank
        )
        each.formed = False
        if forms and owner.parent is None and not each.keeps_dtype and _may_be_formed(each):
            linear: Any = module
            name = name.removesuffix(attribute).removesuffix(".")
            each.formed = yes_or_no(precision, "forms", precision.forms(unit, linear, name), f"'{name}'", rank)
        parts[1 if each.keeps_dtype else 2 if each.formed else 0].append(each)
    return [tuple(part) for part in parts if part]


def _may_be_formed(parameter: ManagedParameter) -> bool:
    original: Any = parameter.original
    module, attribute = parameter.sites[0]
    return (
        parameter.leaf is None
        and not parameter.extended
        and len(parameter.sites) == 1
        # Of a subclass, or with a replaced method, the forward computes something else.
        and type(module) is nn.Linear
        and attribute == "weight"
        and "forward" not in module.__dict__
        and type(original) is nn.Parameter
        and original.dtype.is_floating_point
        and not is_packed(original.dtype)
        and original.stride() == contiguous_stride(original.shape)
        and original.numel() > 0
    )


def _forms_in(
    precision: PrecisionPlugin, unit: UnitSpec, layout: FlatLayout, compute: torch.dtype, rank: int
) -> tuple[LinearForm, ...]:
    """The forms of the weights of ``unit``, those of each segment of ``layout`` by themselves.

    Raises:
        ConfigError: the precision plugin does not form weights that are cut so.
        PluginContractError: it answered what its contract does not allow.
        UnsupportedError: a weight is cut along another dimension than the first.
    """
    if layout.staged:
        raise UnsupportedError(
            f"'{unit.parameter_names[layout.staged[0]]}' would be cut along dimension "
            f"{layout.slots[layout.staged[0]].dim}, and its precision plugin computes with the bytes of a gather, "
            "which lie rank by rank then. Place it along 0, or take another precision."
        )
    found = []
    named = list(zip(unit.parameter_names, layout.slots, strict=True))
    for number, (start, numel) in enumerate(zip(layout.starts, layout.slices, strict=True)):
        inside = [(name, slot) for name, slot in named if slot.segment == number]
        weights = FormedWeights(
            unit=unit.label,
            names=tuple(name for name, _ in inside),
            shapes=tuple((slot.shape[0], slot.shape[1]) for _, slot in inside),
            offsets=tuple(slot.offset - layout.world_size * start for _, slot in inside),
            shards=layout.world_size,
            shard_numel=numel,
            compute=compute,
            device=unit.device,
        )
        found.append(form_of(precision, weights, rank))
    return tuple(found)


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


def _refuse_beside_buffers(module: PlannedModule, collectives: Collectives) -> None:
    """Raise where parameters that gather themselves, or compute as bytes, meet what needs them in a flat buffer; and
    where a part of that would be kept, whose memory is the backend's."""
    for unit in module.units:
        parameter, rank = unit.parameters[0], f"(rank {collectives.rank})"
        if unit.ranks.post_forward_size is not None and collectives.capabilities.fixed_addresses:
            raise ConfigError(
                f"reshard_after_forward={unit.ranks.post_forward_size} for '{module.name or '(root)'}' {rank} would "
                "keep a part beside a gather buffer that these collectives never give back. Give True or False, or "
                "other collectives."
            )
        if parameter.extended:
            where = f"'{parameter.names[0]}', a {type(parameter.original).__name__} that gathers itself {rank}"
            instead = "pass it in ignored_parameters"
        elif unit.forms:
            precision = type(module.precision).__name__
            where = f"'{unit.spec.parameter_names[0]}', which {precision} keeps in bytes of its own {rank}"
            instead = "another precision"
        else:
            continue
        if unit.ranks.post_forward_size is not None:
            raise UnsupportedError(
                f"reshard_after_forward={unit.ranks.post_forward_size} for {where}: it is gathered from the shards of "
                "all ranks alone. Give True or False."
            )
        if parameter.extended and unit.offloaded:
            raise UnsupportedError(
                f"{type(module.offload).__name__} would offload {where}, and takes flat buffers alone. Leave "
                "offloading out, or pass the parameter in ignored_parameters."
            )
        if collectives.capabilities.fixed_addresses:
            raise UnsupportedError(
                f"{type(collectives).__name__} gathers into memory of its own, and {where} has memory of its own, too. "
                f"Take other collectives, or {instead}."
            )


def _refuse_unrouted(module: PlannedModule, collectives: Collectives) -> None:
    """Raise UnsupportedError where shards of parameters cannot be made from those of several masters."""
    for unit in module.units:
        if unit.ranks.lists.near is None:
            continue
        parameter, precision = unit.parameters[0], type(module.precision).__name__
        if parameter.extended:
            fault = f"'{parameter.names[0]}' gathers itself. Pass it in ignored_parameters"
        elif unit.forms or unit.encoding is not None:
            fault = f"{precision} encodes what '{module.name or '(root)'}' gathers. Choose a precision that casts"
        elif not collectives.capabilities.exchanges:
            fault = f"{type(collectives).__name__} has no all_to_all. Choose collectives that have"
        elif collectives.capabilities.fixed_addresses:
            fault = f"{type(collectives).__name__} gathers into memory of its own. Choose other collectives"
        else:
            continue
        raise UnsupportedError(
            f"Ranks that share parameters would copy the masters of others to them, and {fault}; or choose another "
            f"strategy than 'hfsdp', and shard_parameters=True (rank {collectives.rank})."
        )


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


def _full_precision_in_eval(precision: PrecisionPlugin, unit: UnitSpec, rank: int) -> bool:
    answer = precision.full_precision_in_eval(unit)
    return yes_or_no(precision, "full_precision_in_eval", answer, f"unit '{unit.label}'", rank)


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
