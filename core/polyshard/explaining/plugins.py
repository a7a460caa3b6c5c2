"""The plugins of a configuration, as an explanation shows them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .. import catalog
from ..catalog.resolved import option_parameters
from ..config import GROUP_OF_SETTING, Origin, PluginChoice, ShardConfig, Source
from ..events import Events
from ..interfaces import Group, PluginContext, UnitPlan, WrapPolicy
from ..planning.answers import refuse_unable
from ..planning.layout import NamedLayout
from ..setup.plugins import group_of, policy_choice, refuse_unserved
from .explanation import ExplainedPlugin, Value
from .stand_ins import StoodInPlugins, Tried, Workbench

#: Tells where an option of a plugin was set.
OptionSource = Callable[[str], Source]


class WatchedPolicy(WrapPolicy):
    """A policy, and what it chose."""

    api_version = 1

    def __init__(self, policy: WrapPolicy) -> None:
        self.policy = policy
        self.chosen: UnitPlan = {}

    def plan(self, root: Any, context: Any) -> UnitPlan:
        chosen = self.policy.plan(root, context)
        if isinstance(chosen, Mapping):
            self.chosen = chosen
        return chosen


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The plugins that a configuration names, with which a model can be laid out."""

    plugins: StoodInPlugins
    policy: WatchedPolicy
    explained: tuple[ExplainedPlugin, ...]
    layout: str
    """Name of the layout."""


def find(config: ShardConfig, context: PluginContext, workbench: Workbench) -> Found:
    """Resolve and construct what ``config`` names; listeners are not constructed, since they may write files.

    Raises what sharding would, and nothing for what only ranks or a device could construct.
    """
    made = {
        setting: workbench.construct(group, _choice(config, setting), context)
        for setting, group in GROUP_OF_SETTING.items()
    }
    collectives = made["collectives"]
    if not collectives.absent:
        refuse_unable(collectives.instance, 0)
        refuse_unserved(collectives, context, workbench.world_size)
    explained = [explained_plugin(each, setting, partial(config.source_of, setting)) for setting, each in made.items()]
    # Of the program's own, to see that they have hooks.
    Events([(type(each).__name__, each) for each in config.listeners if not isinstance(each, str | Mapping)])
    for position, choice in enumerate(config.listeners):
        explained.append(_listener(choice, f"listeners[{position}]", config.source_of("listeners"), workbench))
    policy = WatchedPolicy(made["policy"].instance)
    layout = made["layout"]
    plugins = StoodInPlugins(
        context,
        workbench.ranks(context),
        made["precision"].instance,
        made["offload"].instance,
        policy,
        NamedLayout(layout.instance, layout.resolved.described),
        Events([]),
        tuple(made.values()),
        collectives.instance,
        workbench.entry_points,
        workbench,
    )
    return Found(plugins, policy, tuple(explained), layout.resolved.name)


def _choice(config: ShardConfig, setting: str) -> PluginChoice:
    """As sharding reads it."""
    if setting == "collectives":
        return group_of(config)[0]
    choice: PluginChoice = getattr(config, setting)
    return policy_choice(choice) if setting == "policy" else choice


def explained_plugin(constructed: catalog.Constructed[Any], serves: str, source: OptionSource) -> ExplainedPlugin:
    """``constructed``, which ``serves`` a setting, with where its options come from."""
    used, resolved = catalog.used(constructed), constructed.resolved
    inner = zip(constructed.inner, constructed.choices, strict=True)
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
            explained_plugin(each, used.name, partial(_source_inside, resolved, source, choice))
            for each, choice in inner
        ),
        absent=constructed.absent if isinstance(constructed, Tried) else "",
    )


def _source_inside(outer: catalog.Resolved[Any], source: OptionSource, choice: object, option: str) -> Source:
    """Where an ``option`` of ``choice``, by which ``outer`` asked for a plugin, was set."""
    for name, value in outer.options.items():
        if value is choice or (isinstance(value, list | tuple) and any(each is choice for each in value)):
            return source(name)
    return Source(Origin.CODE, f"plugin {outer.name}")


def _listener(choice: Any, serves: str, source: Source, workbench: Workbench) -> ExplainedPlugin:
    resolved: catalog.Resolved[Any] = catalog.resolve(Group.PLUGINS, choice, workbench.entry_points)
    resolved.check_options()
    given = None if resolved.distribution else choice
    described = explained_plugin(catalog.Constructed(resolved, given), serves, lambda option: source)
    return dataclasses.replace(described, absent="" if given is not None else "listeners may write files")


def _options(resolved: catalog.Resolved[Any], source: OptionSource) -> tuple[Value, ...]:
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
