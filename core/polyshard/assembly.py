"""From a configuration and a model to a sharded model: resolves plugins, checks everything, then builds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import EntryPoints
from typing import Any, cast

import torch
from torch import nn

from . import catalog
from .agreement import agree
from .building import Blueprint, build, close_groups, give_up, prepare
from .compared import kind_of, rows_of
from .config import PluginChoice, ShardConfig, Strategy
from .devices import compute_device
from .engine.cutting.broken import refuse_broken
from .engine.cutting.materialize import Initializer, refuse_uninitializable
from .engine.planning.answers import leaves_alone, refuse_unable
from .engine.planning.arrangement import NamedLayout
from .engine.planning.draft import Draft, draft_stage
from .engine.planning.parking import decide_parking
from .engine.planning.plan import (
    STAGE_ATTRIBUTE,
    PlannedStage,
    parameters_to_shard,
    plan_stages,
    refuse_sharded,
    refuse_unshardable,
)
from .engine.planning.ranks import RankGrid
from .engine.planning.values import described_buffers, described_values
from .engine.step.root import Root
from .engine.surface.live_roots import live_roots
from .errors import AlreadyShardedError, ConfigError, DeviceError, ParameterError, RankMismatchError, WorldSizeError
from .events import Events
from .interfaces import (
    Collectives,
    Group,
    OffloadManager,
    PluginContext,
    PolicyContext,
    PrecisionCaster,
    RankAndSize,
    WrapPolicy,
)
from .rank_groups import rank_lists_for, strategy_for, subgroup

#: The settings that ranks compare as they are; the others show in what they lead to.
_COMPARED = (
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
    "batch_nbytes",
    "split_root",
    "sync_module_states",
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked to shard."""

    module: nn.Module
    config: ShardConfig
    initializer: Initializer | None
    ignored_modules: Collection[nn.Module]
    ignored_parameters: Collection[nn.Parameter]
    composes: bool
    """Modules inside may be sharded already, and become part of the new root."""


@dataclass(frozen=True, slots=True)
class _Plugins:
    """What a configuration's names stand for."""

    context: PluginContext
    collectives: Collectives
    caster: PrecisionCaster
    offload: OffloadManager
    policy: WrapPolicy
    layout: NamedLayout
    events: Events
    used: tuple[catalog.Constructed[Any], ...]
    """All of them, the collectives first."""
    collectives_choice: object
    """The options of the collectives, or the object that the user gave: equal where two instances could be one."""
    entry_points: EntryPoints
    """What is installed, for the plugins that a policy names."""


def shard_module(request: Request) -> Root:
    """Shard ``request.module`` in place.

    Everything that can be wrong is found first, then ranks agree, and only then is the model changed.
    """
    config = request.config
    choice, process_group, mesh = _group_of(config)
    collectives: Collectives | None = None
    error: Exception | None = None
    report: list[Any] = []
    try:
        entry_points = catalog.scan()
        context = PluginContext(
            name="",
            device=compute_device(config, request.module, request.ignored_modules),
            process_group=process_group,
            mesh=mesh,
            timeout=timedelta(seconds=config.timeout_s),
        )
        collectives_plugin = catalog.resolve(Group.COLLECTIVES, choice, entry_points)
        constructed = catalog.construct(collectives_plugin, context, entry_points)
        collectives = constructed.instance
        plugins = _resolve(request, context, constructed, entry_points)
        strategy = strategy_for(config, collectives.world_size)
        shard_lists, replicate_lists = rank_lists_for(config, strategy, collectives.world_size)
        planned = _plan(request, plugins, len(shard_lists[0]))
        _refuse_unmeasured(config, strategy, context.device, collectives.rank)
        if plugins.events.active:
            plugins.events.before_shard(request.module, config)
        drafts, overrides = _draft(request, plugins, planned, len(shard_lists[0]))
        report = [
            *(row for used in plugins.used for row in catalog.fingerprint(used)),
            ["collectives", *kind_of(collectives)],
            [strategy.value, shard_lists, replicate_lists],
            *([name, getattr(config, name)] for name in _COMPARED),
            *(row for draft, override in zip(drafts, overrides, strict=True) for row in rows_of(draft, override)),
            *_values(request, planned, collectives),
        ]
    except Exception as raised:
        error = raised
    timeout = timedelta(seconds=config.timeout_s)
    if config.check_ranks:
        agree(report, error, collectives, process_group, timeout)
    elif error is not None:
        raise error
    # agree() raised if anything above did.
    assert collectives is not None
    if strategy is not config.strategy:
        warnings.warn(
            f"polyshard is switching to use `NO_SHARD` instead of {config.strategy} since the world size is 1.",
            stacklevel=4,
        )
    blueprint = Blueprint(
        request.module,
        config,
        strategy,
        context.device,
        request.initializer,
        drafts,
        plugins.events,
        signature=(
            catalog.fingerprint(plugins.used[0]),
            plugins.collectives_choice,
            plugins.context.process_group,
            (shard_lists, replicate_lists),
        ),
        # Collectives that the user made are the user's to close.
        constructs=plugins.collectives_choice is not collectives,
    )
    with ExitStack() as groups:
        with ExitStack() as undo:
            with _together(config, collectives, process_group):
                shard, replicate = subgroup(collectives, shard_lists), subgroup(collectives, replicate_lists)
                grid = RankGrid(collectives, shard, replicate)
                if config.check_ranks:
                    # All ranks fail alike then, and so close alike.
                    groups.callback(close_groups, blueprint, grid)
                masters, put_back = prepare(blueprint, grid)
                undo.callback(put_back)
            # The last moment at which every rank could still keep its model: nothing was let go of.
            undo.pop_all()
        try:
            with _together(config, collectives, process_group):
                root = build(blueprint, grid, masters)
        except RankMismatchError as mismatch:
            give_up(blueprint, grid, str(mismatch))
            raise
        groups.pop_all()
    return root


@contextmanager
def _together(config: ShardConfig, collectives: Collectives, process_group: Any | None) -> Iterator[None]:
    """Leave when every rank has left the body; raise on every rank if the body raised on any.

    Raises:
        RankMismatchError: another rank failed while this one did not.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if config.check_ranks:
        agree([], error, collectives, process_group, timedelta(seconds=config.timeout_s))
    elif error is not None:
        raise error


def _resolve(
    request: Request,
    context: PluginContext,
    constructed: catalog.Constructed[Collectives],
    entry_points: EntryPoints,
) -> _Plugins:
    config, collectives = request.config, constructed.instance
    precision = catalog.resolve(Group.PRECISION, config.precision, entry_points)
    offload = catalog.resolve(Group.OFFLOAD, config.offload, entry_points)
    policy = catalog.resolve(Group.POLICIES, _policy_choice(config.policy), entry_points)
    layout = catalog.resolve(Group.LAYOUTS, config.layout, entry_points)
    listeners = [catalog.resolve(Group.PLUGINS, choice, entry_points) for choice in config.listeners]
    _refuse_unserved(constructed, context)
    watched = dataclasses.replace(context, rank=collectives.rank, world_size=collectives.world_size)
    caster = catalog.construct(precision, context, entry_points)
    manager = catalog.construct(offload, context, entry_points)
    wraps = catalog.construct(policy, context, entry_points)
    arranges = catalog.construct(layout, context, entry_points)
    watching = [catalog.construct(plugin, watched, entry_points) for plugin in listeners]
    used: tuple[catalog.Constructed[Any], ...] = (constructed, caster, manager, wraps, arranges, *watching)
    chosen = constructed.resolved
    return _Plugins(
        context,
        collectives,
        caster.instance,
        manager.instance,
        wraps.instance,
        NamedLayout(arranges.instance, layout.described),
        Events([(each.resolved.name, each.instance) for each in watching]),
        used,
        chosen.options if chosen.distribution else collectives,
        entry_points,
    )


def _refuse_unserved(constructed: catalog.Constructed[Collectives], context: PluginContext) -> None:
    collectives, name = constructed.instance, constructed.resolved.name
    capabilities = collectives.capabilities
    if context.device.type not in capabilities.devices:
        raise DeviceError(
            f"The collectives {name!r} serve {', '.join(sorted(capabilities.devices))} tensors, but "
            f"the model computes on {context.device} (rank {collectives.rank}). Move the model, set device=, or choose "
            "other collectives."
        )
    least, most = capabilities.min_world_size, capabilities.max_world_size
    if collectives.world_size < least or (most is not None and collectives.world_size > most):
        raise WorldSizeError(
            f"The collectives {name!r} serve {least} to {most or 'any number of'} ranks, but "
            f"there are {collectives.world_size} (rank {collectives.rank}). Start another number of them, or choose "
            "other collectives."
        )


def _plan(request: Request, plugins: _Plugins, shards: int) -> list[PlannedStage]:
    module, rank = request.module, plugins.collectives.rank
    refuse_broken(module, "shard()")
    if request.composes:
        if STAGE_ATTRIBUTE in module.__dict__:
            refuse_sharded(module, rank)
    else:
        refuse_sharded(module, rank)
    _refuse_pieces(request, rank)
    refuse_unshardable(
        module,
        ignored_modules=request.ignored_modules,
        ignored_parameters=request.ignored_parameters,
        rank=rank,
    )
    refuse_unable(plugins.caster, rank)
    chosen = plugins.policy.plan(
        module, PolicyContext(request.ignored_modules, request.ignored_parameters, shards, plugins.context.device)
    )
    if isinstance(chosen, Mapping):
        alone = {
            inner: dict[str, Any]()
            for name, inner in module.named_modules()
            if inner not in chosen and inner is not module and leaves_alone(plugins.caster, inner, name, rank)
        }
        chosen = {**chosen, **alone}
    planned = plan_stages(
        module,
        chosen,
        ignored_modules=request.ignored_modules,
        ignored_parameters=request.ignored_parameters,
        rank=rank,
        # Where nothing is gathered, one unit around the others costs nothing.
        divides=request.config.split_root and shards > 1,
    )
    own = {inner for modules in _own_modules(planned, request) for inner in modules}
    named = {inner: name for name, inner in module.named_modules() if inner in own}
    refuse_uninitializable(planned, named, request.initializer, rank)
    _refuse_irreducible(planned, plugins.collectives)
    return planned


def _refuse_pieces(request: Request, rank: int) -> None:
    """Raise if a module that is not inside of this one has cut a parameter already: its piece would be cut again."""
    module = request.module
    named = parameters_to_shard(
        module, ignored_modules=request.ignored_modules, ignored_parameters=request.ignored_parameters
    )
    inside = set(module.modules())
    for name, found in zip(named.values(), live_roots.find(list(named)), strict=True):
        if found is None or found.slot is None:
            continue
        holder = found.root.stages[0].module
        if holder in inside:
            # ``plan_stages`` refuses it.
            continue
        there = f"'{found.unit.parameters[found.slot].names[0]}' of {type(holder).__name__}"
        if module in set(holder.modules()):
            where = f"{there}, which contains this module"
            instead = "Leave this call out, or compose the model from the inside out with fully_shard"
        else:
            where = f"{there}, which shares it"
            instead = "Shard neither by itself: call polyshard.shard or fully_shard on the module that contains both"
        raise AlreadyShardedError(
            f"Parameter '{name}' of this {type(module).__name__} is sharded already, as {where} (rank {rank}). "
            f"{instead}."
        )


def _draft(
    request: Request, plugins: _Plugins, planned: Sequence[PlannedStage], shards: int
) -> tuple[tuple[Draft, ...], list[list[Any]]]:
    """The stages laid out, and what ranks compare of each one's overrides."""
    drafts, overrides = [], []
    rank, device = plugins.collectives.rank, plugins.context.device
    for stage, modules in zip(planned, _own_modules(planned, request), strict=True):
        compared: list[Any] = [["reshard_after_forward", stage.overrides.get("reshard_after_forward")]]
        caster: PrecisionCaster = _override(Group.PRECISION, stage, "precision", plugins.caster, plugins, compared)
        offload: OffloadManager = _override(Group.OFFLOAD, stage, "offload", plugins.offload, plugins, compared)
        layout = plugins.layout
        own = _overriding(Group.LAYOUTS, stage, "layout", plugins, compared)
        if own is not None:
            layout = NamedLayout(own.instance, own.resolved.described)
        refuse_unable(caster, rank)
        refuse_unable(offload, rank)
        drafts.append(
            draft_stage(
                stage,
                modules,
                shards,
                device,
                caster,
                offload,
                layout,
                plugins.events,
                is_root=stage.governing is request.module,
                rank=rank,
            )
        )
        overrides.append(compared)
    return decide_parking(drafts, rank), overrides


def _refuse_irreducible(planned: list[PlannedStage], collectives: Collectives) -> None:
    for stage in planned:
        for group in stage.groups:
            dtype = group[0].original.dtype
            trained = group[0].original.requires_grad and collectives.world_size > 1
            if trained and dtype.is_complex and dtype not in collectives.capabilities.dtypes:
                raise ParameterError(
                    f"The collectives do not reduce {dtype}, which '{group[0].names[0]}' has (rank "
                    f"{collectives.rank}). Keep real and imaginary parts as real parameters, or pass it in "
                    "ignored_parameters."
                )


def _override(group: Group, stage: PlannedStage, key: str, default: Any, plugins: _Plugins, compared: list[Any]) -> Any:
    own = _overriding(group, stage, key, plugins, compared)
    return default if own is None else own.instance


def _overriding(
    group: Group, stage: PlannedStage, key: str, plugins: _Plugins, compared: list[Any]
) -> catalog.Constructed[Any] | None:
    if key not in stage.overrides:
        return None
    constructed = catalog.construct(
        catalog.resolve(group, stage.overrides[key], plugins.entry_points), plugins.context, plugins.entry_points
    )
    compared.append(catalog.fingerprint(constructed))
    return constructed


def _group_of(config: ShardConfig) -> tuple[PluginChoice, Any | None, Any | None]:
    """The collectives' choice, the process group and the mesh that the configuration names."""
    choice, mesh = config.collectives, config.mesh
    if isinstance(choice, (str, Mapping, Collectives)):
        group = mesh.get_group() if mesh is not None and mesh.ndim == 1 else None
        return choice, group, mesh
    if isinstance(choice, torch.distributed.ProcessGroup):
        return "auto", choice, mesh
    if type(choice).__name__ == "DeviceMesh":
        return "auto", cast("Any", choice).get_group(), choice
    if isinstance(choice, RankAndSize):
        return "auto", choice, mesh
    return choice, None, mesh


def _policy_choice(choice: PluginChoice) -> PluginChoice:
    # A function that answers for one module is the custom policy's.
    if isinstance(choice, (str, Mapping, WrapPolicy)) or not callable(choice):
        return choice
    return {"name": "custom", "fn": choice}


def _refuse_unmeasured(config: ShardConfig, strategy: Strategy, device: torch.device, rank: int) -> None:
    chooses = config.reshard_after_forward == "auto" and strategy is not Strategy.NO_SHARD
    if chooses and config.memory_budget is None and device.type != "cuda":
        raise ConfigError(
            f"reshard_after_forward='auto' needs memory_budget on {device.type}, whose free memory is not measured "
            f"(rank {rank}). Give it in bytes or as text such as '70 GiB', or leave reshard_after_forward out."
        )


def _values(request: Request, planned: Sequence[PlannedStage], collectives: Collectives) -> list[list[Any]]:
    config = request.config
    if not config.check_ranks or not collectives.capabilities.can_communicate or collectives.world_size == 1:
        return []
    found = described_values(planned, compare=not config.sync_module_states)
    if config.sync_module_states:
        own = {inner for modules in _own_modules(planned, request) for inner in modules}
        found += described_buffers(named for named in request.module.named_modules() if named[1] in own)
    return found


def _own_modules(planned: Sequence[PlannedStage], request: Request) -> list[list[nn.Module]]:
    """For each stage, the modules inside it that no inner stage owns."""
    others = {stage.module for stage in planned} | set(request.ignored_modules)
    found = []
    for stage in planned:
        own, waiting = [], [stage.module]
        while waiting:
            module = waiting.pop()
            own.append(module)
            waiting += [
                child for child in module.children() if child not in others and STAGE_ATTRIBUTE not in child.__dict__
            ]
        found.append(own)
    return found
