"""Explains a configuration for a model: what sharding would find out before ranks speak to each other.

Plugins that need ranks or a device are replaced by stand-ins; everything else is constructed as sharding would.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from polyshard import registry
from polyshard.config import GROUP_OF_SETTING, Origin, PluginChoice, ShardConfig, Source, config_of
from polyshard.errors import (
    CollectiveError,
    ConfigTypeError,
    PluginContractError,
    PluginLoadError,
    PolyshardError,
    StateError,
    WorldSizeError,
)
from polyshard.events import Events
from polyshard.interfaces import MOST_RANKS, Group, PluginContext, UnitPlan, WrapPolicy
from polyshard.planning.answers import refuse_unable
from polyshard.planning.groups import group_of
from polyshard.planning.units import ChosenPlugins, PlannedModule, PlannedUnit
from polyshard.registry.make import option_parameters
from polyshard.setup.plugins import compute_device, policy_choice, refuse_unserved, world_of
from polyshard.setup.request import Request
from polyshard.setup.shard import plan_shards
from torch import nn
from typing_extensions import override

from .explanation import ExplainedParameter, ExplainedPlugin, ExplainedUnit, Explanation, Value


def explain(
    config: ShardConfig,
    model: nn.Module,
    world_size: int,
    *,
    device: torch.device | str | None = None,
) -> Explanation:
    """Explain ``config`` for ``model`` on ``world_size`` ranks.

    Needs no other ranks, no device and no memory: parameters may be on the meta device, and stay as they are. The
    factories of plugins are called, listeners' aside; collectives and offload managers that need ranks or a device are
    stood in for, and say so in ``ExplainedPlugin.absent``.

    Args:
        config: What to explain. ``source_of`` says where its values came from.
        model: Any module that ``polyshard.shard`` takes.
        world_size: Number of ranks; collectives that the configuration names may have another one.
        device: Where ranks are to compute; None for where ``config`` says or, without that, where the model's
            parameters are. Parameters on the meta device compute on this machine's accelerator, or the CPU. CUDA is
            not asked whether it is there.

    Raises:
        ConfigTypeError: ``model`` is no module.
        ConfigError, PluginError, ShardingError: what sharding would, on any rank.
        WorldSizeError: ``world_size`` is below 1 or above ``MOST_RANKS``, or cannot be divided as the strategy needs.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"explain takes a module, not {model!r}. Give what polyshard.shard would be given.")
    if isinstance(world_size, bool) or not isinstance(world_size, int) or not 1 <= world_size <= MOST_RANKS:
        raise WorldSizeError(
            f"there is no world of {world_size!r} ranks. Give their number, 1 or more, and at most {MOST_RANKS}."
        )
    config = config_of(config, "explain(config, model, ...)")
    placed = config if device is None else dataclasses.replace(config, device=device)
    # The current one of this process would have to be asked of CUDA, which takes memory on a device.
    computes = compute_device(placed, model, (), index=0)
    placed = dataclasses.replace(placed, device=computes)
    _, process_group, mesh = group_of(config)
    context = PluginContext(
        name="",
        device=computes,
        process_group=process_group,
        mesh=mesh,
        timeout=timedelta(seconds=config.timeout_s),
    )
    # Nothing is initialised: with an initializer, modules are taken that cannot initialise themselves.
    request = Request(model, placed, lambda module: None)
    world = world_of(request, mesh)
    if world is not None and len(world.ranks) != world_size:
        raise WorldSizeError(f"the mesh is of {len(world.ranks)} ranks, not {world_size}. Give its number of ranks.")
    workbench = Workbench(world_size)
    made = {
        setting: workbench.construct(registry.resolve_setting(config, setting, _choice(config, setting)), context)
        for setting in GROUP_OF_SETTING
    }
    collectives = made["collectives"]
    if not collectives.absent:
        refuse_unable(collectives.instance, 0)
        refuse_unserved(collectives, context, world_size)
    listeners = _listeners(config)
    policy = WatchedPolicy(made["policy"].instance)
    plugins = StoodInPlugins(
        context,
        workbench.stand_in(Group.COLLECTIVES, context),
        made["precision"].instance,
        made["offload"].instance,
        policy,
        Events([]),
        tuple(made.values()),
        collectives.instance,
        world,
        workbench,
    )
    plan = plan_shards(request, plugins)
    ranks, planned = plan.ranks, plan.modules
    by_policy = Source(Origin.CODE, "the policy")
    units: list[ExplainedUnit] = []
    for each in planned:
        reason = _reason(each, policy, model)
        units += [_unit(each, unit, reason) for unit in each.units]
    return Explanation(
        model=type(model).__name__,
        world_size=world_size,
        shards=len(ranks.lists.shard[0]),
        replicas=len(ranks.lists.replicate[0]),
        near=None if ranks.lists.near is None else len(ranks.lists.near[0]),
        strategy=ranks.strategy,
        device=computes,
        settings=_settings(config, device),
        plugins=(
            *(_plugin(each, setting, partial(config.source_of, setting)) for setting, each in made.items()),
            *listeners,
            *(
                _plugin(constructed, f"{each.name or '(root)'}: {setting}", lambda option: by_policy)
                for each in planned
                for setting, constructed in each.named.items()
            ),
        ),
        units=tuple(units),
    )


def _settings(config: ShardConfig, device: torch.device | str | None) -> tuple[Value, ...]:
    values = []
    for field in dataclasses.fields(config):
        value = Value(field.name, getattr(config, field.name), config.source_of(field.name))
        if field.name == "device" and device is not None:
            value = Value("device", torch.device(device), Source(Origin.CODE, "argument device"))
        values.append(value)
    return tuple(values)


#: Returns where an option of a plugin was set.
OptionSource = Callable[[str], Source]


class WatchedPolicy(WrapPolicy):
    """A policy that remembers the modules that it chose."""

    api_version = 1

    def __init__(self, policy: WrapPolicy) -> None:
        self.policy = policy
        self.chosen: UnitPlan = {}

    @override
    def plan(self, root: Any, context: Any) -> UnitPlan:
        chosen = self.policy.plan(root, context)
        if isinstance(chosen, Mapping):
            self.chosen = chosen
        return chosen


def _choice(config: ShardConfig, setting: str) -> PluginChoice:
    if setting == "collectives":
        return group_of(config)[0]
    choice: PluginChoice = getattr(config, setting)
    return policy_choice(choice) if setting == "policy" else choice


def _plugin(constructed: registry.Constructed, serves: str, source: OptionSource) -> ExplainedPlugin:
    """``constructed``, which ``serves`` a setting, with where its options come from."""
    used, resolved = registry.used(constructed), constructed.resolved
    return ExplainedPlugin(
        serves=serves,
        group=used.group.value,
        name=used.name,
        distribution=used.distribution,
        version=used.version,
        value=used.value,
        file=used.file,
        options=_options(resolved, source),
        inner=tuple(
            _plugin(each, used.name, partial(_source_inside, resolved, source, each.choice))
            for each in constructed.inner
        ),
        absent=constructed.absent if isinstance(constructed, Tried) else "",
        reason=_choice_reason(constructed),
    )


def _choice_reason(constructed: registry.Constructed) -> str:
    if isinstance(constructed, Tried) and constructed.absent:
        reason = getattr(constructed.resolved.factory, "reason", "")
        # Of a class it is the property.
        return reason if isinstance(reason, str) else ""
    return registry.used(constructed).reason


def _source_inside(outer: registry.Resolved, source: OptionSource, choice: object, option: str) -> Source:
    """Where an ``option`` of ``choice``, by which ``outer`` asked for a plugin, was set."""
    for name, value in outer.options.items():
        if value is choice or (isinstance(value, list | tuple) and any(each is choice for each in value)):
            return source(name)
    return Source(Origin.CODE, f"plugin {outer.name}")


def _listeners(config: ShardConfig) -> list[ExplainedPlugin]:
    """They are resolved and not constructed, since they may write files."""
    # To see that the program's own have hooks.
    Events([(type(each).__name__, each) for each in config.listeners if not isinstance(each, str | Mapping)])
    source = config.source_of("listeners")
    found = []
    for position, choice in enumerate(config.listeners):
        resolved = registry.resolve_setting(config, "listeners", choice)
        resolved.check_options()
        given = None if resolved.distribution else choice
        plugin = _plugin(registry.Constructed(resolved, given), f"listeners[{position}]", lambda option: source)
        absent = "" if given is not None else "listeners may write files"
        found.append(dataclasses.replace(plugin, absent=absent))
    return found


def _options(resolved: registry.Resolved, source: OptionSource) -> tuple[Value, ...]:
    """Those that were given, and the factory's defaults of the others."""
    if not resolved.distribution:
        return ()
    try:
        known = option_parameters(inspect.signature(resolved.factory))
    except (TypeError, ValueError):
        known = {}
    taken = {name: each.default for name, each in known.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
    values = {name: Value(name, value, source(name)) for name, value in resolved.options.items()}
    defaults = {
        name: Value(name, default, Source(Origin.DEFAULT))
        for name, default in taken.items()
        if default is not inspect.Parameter.empty
    }
    ordered = [name for name in taken if name in values or name in defaults]
    everything = defaults | values
    return tuple(everything[name] for name in dict.fromkeys([*ordered, *values]))


#: Parts of torch that raise where ranks or a device are missing.
_NEEDED = ("torch.distributed", "torch.cuda")


def _misses_ranks_or_device(error: PolyshardError) -> bool:
    """Whether a factory raised ``error`` for what ``explain`` has not, rather than for a mistake."""
    cause = error.__cause__
    if not isinstance(error, PluginLoadError) or cause is None:
        return isinstance(error, StateError | CollectiveError)
    *_, (innermost, _) = traceback.walk_tb(cause.__traceback__)
    return str(innermost.f_globals.get("__name__")).startswith(_NEEDED)


@dataclass(frozen=True)
class Tried(registry.Constructed):
    """A plugin whose factory was called."""

    absent: str = ""
    """Why the instance is a stand-in's; empty where it is the plugin's own."""


@dataclass(frozen=True, slots=True)
class Workbench:
    """Where plugins are constructed to be explained."""

    world_size: int
    """Number of ranks that collectives are stood in for with."""

    def construct(self, resolved: registry.Resolved, context: PluginContext) -> Tried:
        """``resolved``, constructed, or a stand-in where it needs ranks or a device.

        Raises what ``registry.construct`` does for whatever else is wrong.
        """
        group = resolved.group
        inner: list[registry.Constructed] = []
        refused: list[PolyshardError] = []

        def make_inner(group: Group, choice: PluginChoice, context: PluginContext) -> registry.Constructed:
            try:
                inner.append(replace(self.construct(registry.resolve(group, choice), context), choice=choice))
            except PolyshardError as error:
                refused.append(error)
                raise
            return inner[-1]

        try:
            made = registry.construct(resolved, context, make_inner)
        except PolyshardError as error:
            # What an inner plugin misses is stood in for already: what it raises is wrong anywhere.
            if group not in _STAND_INS or error in refused or not _misses_ranks_or_device(error):
                raise
            return Tried(resolved, self.stand_in(group, context), tuple(inner), absent=str(error))
        return Tried(resolved, made.instance, made.inner)

    def stand_in(self, group: Group, context: PluginContext) -> Any:
        """The replacement of a plugin that cannot be constructed here: pretended collectives, or no offloading."""
        choice = dict(_STAND_INS[group])
        if group is Group.COLLECTIVES:
            choice["world_size"] = self.world_size
        resolved = registry.resolve(group, choice)
        return registry.construct(resolved, replace(context, process_group=None)).instance


#: Replacements of plugins that may need ranks or a device. Plugins of the other groups only choose.
_STAND_INS: Mapping[Group, Mapping[str, Any]] = {
    Group.COLLECTIVES: {"name": "polyshard:fake", "rank": 0},
    Group.OFFLOAD: {"name": "polyshard:none"},
}


@dataclass(frozen=True, slots=True)
class StoodInPlugins(ChosenPlugins):
    """Plugins, some of them stand-ins, also those that a policy names for a unit."""

    workbench: Workbench

    @override
    def override(self, group: Group, choice: PluginChoice) -> registry.Constructed:
        return self.workbench.construct(registry.resolve(group, choice), self.context)


def _unit(module: PlannedModule, unit: PlannedUnit, reason: str) -> ExplainedUnit:
    spec, flat, dtypes = unit.spec, unit.layout, unit.dtypes
    elements = sum(slot.numel for slot in flat.slots)
    gather_nbytes = 0 if flat.world_size == 1 else unit.gathered_nbytes_per_rank
    return ExplainedUnit(
        name=spec.label,
        module_class=type(module.module).__name__,
        parameters=tuple(
            ExplainedParameter(name, slot.shape, slot.offset, slot.dim)
            for name, slot in zip(spec.parameter_names, flat.slots, strict=True)
        ),
        elements=elements,
        padding=flat.padded_numel - elements,
        shard_elements=flat.shard_numel,
        trained=unit.parameters[0].original.requires_grad,
        master=spec.master_dtype,
        compute=dtypes.compute,
        communication=dtypes.communication,
        reduce=dtypes.reduce,
        grad=dtypes.grad,
        gather_nbytes=gather_nbytes,
        encoded=unit.encoding is not None or bool(unit.forms),
        overrides=dict(module.overrides),
        reason=reason,
        ranks=spec.ranks,
        shards=unit.ranks.shards,
        replicas=len(unit.ranks.lists.replicate[0]),
        divisor=unit.ranks.lists.data_ranks if unit.ranks.divisor is None else unit.ranks.divisor,
    )


def _reason(module: PlannedModule, policy: WatchedPolicy, root: nn.Module) -> str:
    if module.module is root:
        return "what no unit inside of it holds"
    if module.parent is not None:
        return "a large module before or behind all units (split_root)"
    if module.module not in policy.chosen:
        return "the precision leaves it alone"
    where = f"reason of {type(policy.policy).__module__}:{type(policy.policy).__qualname__} for '{module.name}'"
    try:
        answer: object = policy.policy.reason(module.module, module.name)
    except Exception as error:
        raise PluginContractError(f"{where} failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise PluginContractError(f"{where} answered {answer!r}. Return text, empty where there is nothing to say.")
    return answer or "the policy chose it"
