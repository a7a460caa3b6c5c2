"""From a configuration and a model to a sharded model: resolves plugins, checks everything, then builds."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import catalog
from .._torch_private import post_accumulate_grad_hooks
from .._version import __version__
from ..config import ShardConfig, Strategy
from ..errors import AlreadyShardedError, ConfigError, ParameterError, RankMismatchError
from ..functions.lookup import live_roots
from ..interfaces import Collectives, Group, OffloadManager, PluginContext, PolicyContext, PrecisionCaster
from ..planning.answers import leaves_alone, refuse_unable
from ..planning.draft import Draft, decide_parking, draft_module_state
from ..planning.groups import RankGrid, rank_lists_for, strategy_for, subgroup
from ..planning.layout import NamedLayout
from ..planning.plan import (
    MODULE_STATE_ATTRIBUTE,
    PlannedModule,
    parameters_to_shard,
    plan_module_states,
    refuse_sharded,
    refuse_unshardable,
)
from ..planning.values import described_buffers, described_values
from ..runtime.root import Root
from .agree import agree, stands_alone
from .build import Blueprint, build, close_groups, give_up, prepare, refuse_broken
from .differences import kind_of, rows_of
from .materialize import Initializer, refuse_uninitializable
from .plugins import ChosenPlugins, compute_device, construct_plugins, group_of

_LOGGER = logging.getLogger(__name__)

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


def shard_module(request: Request) -> Root:
    """Shard ``request.module`` in place.

    Everything that can be wrong is found first, then ranks agree, and only then is the model changed.
    """
    config = request.config
    choice, process_group, mesh = group_of(config)
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
        plugins = construct_plugins(config, context, constructed, entry_points)
        strategy = strategy_for(config, collectives.world_size)
        shard_lists, replicate_lists = rank_lists_for(config, strategy, collectives.world_size)
        planned = _plan(request, plugins, len(shard_lists[0]))
        _refuse_unmeasured(config, strategy, context.device, collectives.rank)
        _tell_unreduced(request, planned, collectives)
        if plugins.events.active:
            plugins.events.before_shard(request.module, config)
        drafted = _draft(request, plugins, planned, len(shard_lists[0]))
        signature = catalog.fingerprint(plugins.used[0])
        report = [
            *catalog.Permission.read().rows(),
            *signature,
            *(row for used in plugins.used[1:] for row in catalog.fingerprint(used)),
            ["collectives", *kind_of(collectives)],
            *_own_code(config, collectives),
            ["strategy", strategy.value, shard_lists, replicate_lists],
            *([name, getattr(config, name)] for name in _COMPARED),
            # Some thirty lists a unit, for others alone.
            *(() if stands_alone(collectives, process_group) else (row for each in drafted for row in each.rows())),
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
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info(
            "rank %d of %d shards %s with %s",
            collectives.rank,
            collectives.world_size,
            type(request.module).__name__,
            plugins.told(),
        )
    blueprint = Blueprint(
        request.module,
        config,
        strategy,
        context.device,
        request.initializer,
        request.ignored_modules,
        tuple(each.draft for each in drafted),
        plugins.events,
        signature=(
            signature,
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
    _remember(request.module, plugins, drafted)
    return root


#: Attribute under which a module that was sharded holds the plugins that serve it.
_PLUGINS_ATTRIBUTE = "_polyshard_plugins"


def _remember(module: nn.Module, plugins: ChosenPlugins, drafted: Sequence[Drafted]) -> None:
    found = [catalog.used(each) for each in plugins.used]
    found += [catalog.used(own, each.draft.module_state.name) for each in drafted for own in each.overrides.values()]
    module.__dict__[_PLUGINS_ATTRIBUTE] = tuple(found)


def plugins_of(model: nn.Module) -> tuple[catalog.UsedPlugin, ...]:
    """The plugins that ``model`` and the modules inside it, where they were sharded by themselves, were given."""
    found: list[catalog.UsedPlugin] = []
    for name, inner in model.named_modules():
        for each in inner.__dict__.get(_PLUGINS_ATTRIBUTE, ()):
            found.append(dataclasses.replace(each, module=".".join(filter(None, (name, each.module)))))
    return tuple(found)


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


@dataclass(frozen=True, slots=True)
class _Planned:
    """The module states of a request, the root's first."""

    module_states: list[PlannedModule]
    modules: list[list[nn.Module]]
    """For each module state, the modules inside it that no inner module state owns."""


def _plan(request: Request, plugins: ChosenPlugins, shards: int) -> _Planned:
    module, rank = request.module, plugins.collectives.rank
    refuse_broken(module, "shard()")
    if request.composes:
        if MODULE_STATE_ATTRIBUTE in module.__dict__:
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
    context = PolicyContext(
        request.ignored_modules, request.ignored_parameters, shards, plugins.context.device, partial(_say, rank)
    )
    chosen = plugins.policy.plan(module, context)
    names = {inner: name for name, inner in module.named_modules()}
    if isinstance(chosen, Mapping):
        alone = {
            inner: dict[str, Any]()
            for inner, name in names.items()
            if inner not in chosen and inner is not module and leaves_alone(plugins.caster, inner, name, rank)
        }
        chosen = {**chosen, **alone}
    planned = plan_module_states(
        module,
        chosen,
        ignored_modules=request.ignored_modules,
        ignored_parameters=request.ignored_parameters,
        rank=rank,
        # Where nothing is gathered, one unit around the others costs nothing.
        divides=request.config.split_root and shards > 1,
    )
    owned = _own_modules(planned, request)
    own = {inner for modules in owned for inner in modules}
    named = {inner: name for inner, name in names.items() if inner in own}
    refuse_uninitializable(planned, named, request.initializer, rank)
    _refuse_irreducible(planned, plugins.collectives)
    return _Planned(planned, owned)


def _say(rank: int, text: str) -> bool:
    """Warn of what all ranks see alike, on the first; returns whether this is it."""
    if rank == 0:
        warnings.warn(text, stacklevel=6)
    return rank == 0


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
        holder = found.root.module_states[0].module
        if holder in inside:
            # ``plan_module_states`` refuses it.
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


@dataclass(frozen=True, slots=True)
class Drafted:
    """A module state laid out."""

    draft: Draft
    overrides: dict[str, catalog.Constructed[Any]]
    """The plugins that the policy named for it, by setting."""
    fingerprints: tuple[Any, ...]
    """Of these plugins: asked for where nobody compares them, too, so that one that cannot answer shows everywhere."""

    def rows(self) -> list[list[Any]]:
        """What ranks compare of it."""
        releases = ["reshard_after_forward", self.draft.module_state.overrides.get("reshard_after_forward")]
        return rows_of(self.draft, [releases, *self.fingerprints])


#: The plugins that a policy may name for a unit.
_OVERRIDDEN = {"precision": Group.PRECISION, "offload": Group.OFFLOAD, "layout": Group.LAYOUTS}


def _draft(request: Request, plugins: ChosenPlugins, planned: _Planned, shards: int) -> tuple[Drafted, ...]:
    rank, device = plugins.collectives.rank, plugins.context.device
    drafted = []
    travelled: dict[torch.dtype, int] = {}
    for module_state, modules in zip(planned.module_states, planned.modules, strict=True):
        own = {
            key: plugins.override(group, module_state.overrides[key])
            for key, group in _OVERRIDDEN.items()
            if key in module_state.overrides
        }
        caster: PrecisionCaster = own["precision"].instance if "precision" in own else plugins.caster
        offload: OffloadManager = own["offload"].instance if "offload" in own else plugins.offload
        layout = plugins.layout
        if "layout" in own:
            layout = NamedLayout(own["layout"].instance, own["layout"].resolved.described)
        refuse_unable(caster, rank)
        refuse_unable(offload, rank)
        draft = draft_module_state(
            module_state,
            modules,
            shards,
            device,
            caster,
            offload,
            layout,
            plugins.events,
            travelled,
            is_root=module_state.governing is request.module,
            rank=rank,
        )
        drafted.append(Drafted(draft, own, tuple(map(catalog.fingerprint, own.values()))))
    parked = decide_parking([each.draft for each in drafted], rank)
    return tuple(Drafted(draft, each.overrides, each.fingerprints) for draft, each in zip(parked, drafted, strict=True))


def draft_module(request: Request, plugins: ChosenPlugins, strategy: Strategy, shards: int) -> tuple[Drafted, ...]:
    """What the module states of ``request`` would be, laid out for so many ``shards``, the root's first. Changes nothing, and
    takes no memory; raises what sharding would before ranks speak to each other.
    """
    planned = _plan(request, plugins, shards)
    _refuse_unmeasured(request.config, strategy, plugins.context.device, plugins.collectives.rank)
    return _draft(request, plugins, planned, shards)


def _refuse_irreducible(planned: list[PlannedModule], collectives: Collectives) -> None:
    for module_state in planned:
        for group in module_state.groups:
            dtype = group[0].original.dtype
            trained = group[0].original.requires_grad and collectives.world_size > 1
            if trained and dtype.is_complex and dtype not in collectives.capabilities.dtypes:
                raise ParameterError(
                    f"The collectives do not reduce {dtype}, which '{group[0].names[0]}' has (rank "
                    f"{collectives.rank}). Keep real and imaginary parts as real parameters, or pass it in "
                    "ignored_parameters."
                )


def _refuse_unmeasured(config: ShardConfig, strategy: Strategy, device: torch.device, rank: int) -> None:
    chooses = config.reshard_after_forward == "auto" and strategy is not Strategy.NO_SHARD
    if chooses and config.memory_budget is None and device.type != "cuda":
        raise ConfigError(
            f"reshard_after_forward='auto' needs memory_budget on {device.type}, whose free memory is not measured "
            f"(rank {rank}). Give it in bytes or as text such as '70 GiB', or leave reshard_after_forward out."
        )


def _tell_unreduced(request: Request, planned: _Planned, collectives: Collectives) -> None:
    """Warn, on one rank, of what is trained and ignored: each rank would train a copy of its own."""
    # Composed from the inside out, the call around this one may take it.
    if request.composes or not (request.ignored_modules or request.ignored_parameters):
        return
    if collectives.rank > 0 or collectives.world_size == 1 or not collectives.capabilities.can_communicate:
        return
    managed = {
        each.original for module_state in planned.module_states for group in module_state.groups for each in group
    }
    names = [
        name
        for name, parameter in request.module.named_parameters()
        if parameter.requires_grad and parameter not in managed and not post_accumulate_grad_hooks(parameter)
    ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"Nothing averages the gradients of {', '.join(map(repr, names[:3]))}{more} over ranks: they are trained, "
            "and ignored by shard(), so that each rank trains copies of its own. Let them be sharded (scalars are, "
            "too), freeze them with requires_grad_(False), or give each a hook that averages its gradient "
            "(register_post_accumulate_grad_hook) before shard(). Where it is meant so, filter this warning.",
            stacklevel=4,
        )


def _own_code(config: ShardConfig, collectives: Collectives) -> list[list[Any]]:
    return [["polyshard", __version__, catalog.engine_digest()]] if _compares(config, collectives) else []


def _compares(config: ShardConfig, collectives: Collectives) -> bool:
    return config.check_ranks and collectives.capabilities.can_communicate and collectives.world_size > 1


def _values(request: Request, planned: _Planned, collectives: Collectives) -> list[list[Any]]:
    config = request.config
    if not _compares(config, collectives):
        return []
    found = described_values(planned.module_states, compare=not config.sync_module_states)
    if config.sync_module_states:
        own = {inner for modules in planned.modules for inner in modules}
        found += described_buffers(named for named in request.module.named_modules() if named[1] in own)
    return found


def _own_modules(planned: Sequence[PlannedModule], request: Request) -> list[list[nn.Module]]:
    others = {module_state.module for module_state in planned} | set(request.ignored_modules)
    found = []
    for module_state in planned:
        own, waiting = [], [module_state.module]
        while waiting:
            module = waiting.pop()
            own.append(module)
            waiting += [
                child
                for child in module.children()
                if child not in others and MODULE_STATE_ATTRIBUTE not in child.__dict__
            ]
        found.append(own)
    return found
