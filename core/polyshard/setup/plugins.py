"""On which device a model computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoints
from typing import Any, cast

import torch
from torch import nn

from .. import catalog
from ..config import PluginChoice, ShardConfig
from ..errors import DeviceError, WorldSizeError
from ..events import Events
from ..interfaces import (
    Collectives,
    Group,
    OffloadManager,
    PluginContext,
    PrecisionCaster,
    RankAndSize,
    WrapPolicy,
)
from ..planning.answers import refuse_unable
from ..planning.layout import NamedLayout


def compute_device(config: ShardConfig, module: nn.Module, ignored_modules: Collection[nn.Module]) -> torch.device:
    """Where ``module`` computes: where the configuration says, or its collectives; else where its parameters are."""
    if config.device is not None:
        device = config.device
    else:
        ignored = {inner for outer in ignored_modules for inner in outer.modules()}
        places = {
            parameter.device
            for inner in module.modules()
            if inner not in ignored
            for parameter in inner._parameters.values()
            if parameter is not None and not parameter.is_meta
        }
        if isinstance(config.collectives, Collectives):
            device = config.collectives.device
        elif places:
            device = sorted(places, key=str)[0]
        else:
            # A build with CUDA names its accelerator on machines that have none.
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = accelerator or torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


# The plugins that a configuration names, constructed for one model.


@dataclass(frozen=True, slots=True)
class ChosenPlugins:
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

    def override(self, group: Group, choice: PluginChoice) -> catalog.Constructed[Any]:
        """The plugin that a policy names for one unit, constructed; raises what a configuration's would."""
        resolved: catalog.Resolved[Any] = catalog.resolve(group, choice, self.entry_points)
        return catalog.construct(resolved, self.context, self.entry_points)

    def told(self) -> str:
        """All of them, in words."""
        return ", ".join(f"{each.resolved.group.value} {catalog.used(each)}" for each in self.used)


def construct_plugins(
    config: ShardConfig,
    context: PluginContext,
    constructed: catalog.Constructed[Collectives],
    entry_points: EntryPoints,
) -> ChosenPlugins:
    """Every plugin that ``config`` names, but for the collectives, which are ``constructed``.

    Raises what resolving and constructing them does, ``DeviceError`` and ``WorldSizeError`` where the collectives do
    not serve the device or the number of ranks.
    """
    collectives = constructed.instance
    precision = catalog.resolve(Group.PRECISION, config.precision, entry_points)
    offload = catalog.resolve(Group.OFFLOAD, config.offload, entry_points)
    policy = catalog.resolve(Group.POLICIES, policy_choice(config.policy), entry_points)
    layout = catalog.resolve(Group.LAYOUTS, config.layout, entry_points)
    listeners = [catalog.resolve(Group.PLUGINS, choice, entry_points) for choice in config.listeners]
    refuse_unable(collectives, collectives.rank)
    refuse_unserved(constructed, context, collectives.world_size)
    watched = dataclasses.replace(context, rank=collectives.rank, world_size=collectives.world_size)
    caster = catalog.construct(precision, context, entry_points)
    manager = catalog.construct(offload, context, entry_points)
    wraps = catalog.construct(policy, context, entry_points)
    arranges = catalog.construct(layout, context, entry_points)
    watching = [catalog.construct(plugin, watched, entry_points) for plugin in listeners]
    used: tuple[catalog.Constructed[Any], ...] = (constructed, caster, manager, wraps, arranges, *watching)
    chosen = constructed.resolved
    return ChosenPlugins(
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


def refuse_unserved(constructed: catalog.Constructed[Collectives], context: PluginContext, world_size: int) -> None:
    """Raise ``DeviceError`` or ``WorldSizeError`` where the collectives do not serve the device, or so many ranks."""
    collectives, name = constructed.instance, constructed.resolved.name
    capabilities = collectives.capabilities
    if context.device.type not in capabilities.devices:
        raise DeviceError(
            f"The collectives {name!r} serve {', '.join(sorted(capabilities.devices))} tensors, but "
            f"the model computes on {context.device} (rank {collectives.rank}). Move the model, set device=, or choose "
            "other collectives."
        )
    least, most = capabilities.min_world_size, capabilities.max_world_size
    if world_size < least or (most is not None and world_size > most):
        raise WorldSizeError(
            f"The collectives {name!r} serve {least} to {most or 'any number of'} ranks, but "
            f"there are {world_size} (rank {collectives.rank}). Start another number of them, or choose "
            "other collectives."
        )


def group_of(config: ShardConfig) -> tuple[PluginChoice, Any | None, Any | None]:
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


def policy_choice(choice: PluginChoice) -> PluginChoice:
    # A function that answers for one module is the custom policy's.
    if isinstance(choice, (str, Mapping, WrapPolicy)) or not callable(choice):
        return choice
    return {"name": "custom", "fn": choice}
