"""The plugins and the device that a configuration names, for one model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from .. import registry
from ..config import PluginChoice, ShardConfig
from ..errors import ConfigError, DeviceError, WorldSizeError
from ..events import Events
from ..interfaces import Collectives, PluginContext, WrapPolicy
from ..planning.answers import refuse_unable
from ..planning.groups import group_of
from ..planning.meshes import WorldMesh, world_mesh
from ..planning.parts import is_dtensor
from ..planning.plan import modules_in, parameters_to_shard
from ..planning.units import ChosenPlugins
from .agree import Agreement
from .request import Request

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def compute_device(
    config: ShardConfig, module: nn.Module, ignored_modules: Collection[nn.Module], index: int | None = None
) -> torch.device:
    """Where ``module`` computes: where the configuration says, or its collectives; else where its parameters are.

    ``index``: of a CUDA device that is named without one; None for the current one.

    Raises DeviceError: torch sees no such device here; not where ``index`` is given.
    """
    if config.device is not None:
        device = config.device
        if index is None and device.type not in ("cpu", "meta"):
            seen = (accelerator := _accelerator()) is not None and accelerator.type == device.type
            count = torch.accelerator.device_count() if seen else 0
            if (device.index or 0) >= count:
                raise DeviceError(
                    f"device is '{device}', but torch {torch.__version__} sees {count or 'no'} {device.type} devices "
                    "here. Set another device, or leave it out: the model then computes where its parameters are."
                )
    elif isinstance(config.collectives, Collectives):
        device = config.collectives.device
    else:
        ignored = {inner for outer in ignored_modules for inner in outer.modules()}
        parameters = (
            each for inner in modules_in(module) if inner not in ignored for each in inner._parameters.values()
        )
        places = sorted({each.device for each in parameters if each is not None and not each.is_meta}, key=str)
        device = places[0] if places else _accelerator() or torch.device("cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    return device


def _accelerator() -> torch.device | None:
    # A build with CUDA names its accelerator on machines that have none.
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def choose_plugins(request: Request, agreement: Agreement) -> ChosenPlugins:
    """Every plugin that the configuration names, constructed. ``agreement`` knows the collectives as soon as they are.

    Raises:
        ConfigError, PluginError: a name cannot be resolved, or a plugin not be constructed.
        DeviceError, WorldSizeError: the collectives do not serve the device or the number of ranks.
    """
    config = request.config
    choice, process_group, mesh = group_of(config)
    world = world_of(request, mesh)
    if world is not None:
        process_group = agreement.process_group = _group_of(world, process_group)
    context = PluginContext(
        name="",
        device=compute_device(config, request.module, request.ignored_modules),
        process_group=process_group,
        mesh=mesh,
        timeout=timedelta(seconds=config.timeout_s),
    )
    constructed = registry.construct(registry.resolve_setting(config, "collectives", choice), context)
    collectives: Collectives = constructed.instance
    chosen, agreement.collectives = constructed.resolved, collectives
    if world is not None and len(world.ranks) != collectives.world_size:
        raise WorldSizeError(
            f"The mesh is of ranks {world.ranks}, but the collectives are of {collectives.world_size} (rank "
            f"{collectives.rank}). Give collectives of the ranks of the mesh, or name them."
        )
    casts = registry.resolve_setting(config, "precision", config.precision)
    offload = registry.resolve_setting(config, "offload", config.offload)
    policy = registry.resolve_setting(config, "policy", policy_choice(config.policy))
    listeners = [registry.resolve_setting(config, "listeners", choice) for choice in config.listeners]
    refuse_unable(collectives, collectives.rank)
    refuse_unserved(constructed, context, collectives.world_size)
    watched = replace(context, rank=collectives.rank, world_size=collectives.world_size)
    precision = registry.construct(casts, context)
    manager = registry.construct(offload, context)
    wraps = registry.construct(policy, context)
    watching = [registry.construct(plugin, watched) for plugin in listeners]
    return ChosenPlugins(
        context,
        collectives,
        precision.instance,
        manager.instance,
        wraps.instance,
        Events([(each.resolved.name, each.instance) for each in watching]),
        (constructed, precision, manager, wraps, *watching),
        chosen.options if chosen.distribution else collectives,
        world,
    )


def world_of(request: Request, mesh: DeviceMesh | None) -> WorldMesh | None:
    """All ranks of a model that has parts on some of them, or may; None where all ranks shard the same.

    Raises ConfigError: dimensions are named, and there is no mesh that could have them; or as ``world_mesh``.
    """
    config = request.config
    for setting in ("shard", "replicate"):
        names = getattr(config, setting)
        if names is not None and config.mesh is None:
            raise ConfigError(
                f"{setting} names {', '.join(map(repr, names))}, but there is no mesh. Give it: "
                "ShardConfig.from_toml(path, mesh=mesh), or dataclasses.replace(config, mesh=mesh)."
            )
    if mesh is None:
        return None
    parameters = parameters_to_shard(
        request.module, ignored_modules=request.ignored_modules, ignored_parameters=request.ignored_parameters
    )
    # Those of modules that a drop-in sharded before are of all its dimensions.
    inside = () if not request.composes else request.module.parameters()
    skipped = set(request.ignored_parameters)
    found = (each for each in (*parameters, *inside) if is_dtensor(each) and each not in skipped)
    others = [cast("DTensor", each).device_mesh for each in found]
    for place in request.placed.values():
        others += [mesh for mesh in (place.mesh, place.part.mesh if place.part else None) if mesh is not None]
    return world_mesh(mesh, dict.fromkeys(others)) if others or config.shard is not None else None


#: Process groups of worlds that are a part of the job. Making one is a meeting of its ranks, which all models share.
_WORLDS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _group_of(world: WorldMesh, given: Any | None) -> Any | None:
    """The process group of ``world``; None where there are no process groups. Its ranks call it together."""
    if not (dist.is_available() and dist.is_initialized()):
        return given
    ranks = world.ranks
    for known in (given, dist.group.WORLD, _WORLDS.get(tuple(ranks))):
        # A group may have been destroyed.
        with suppress(KeyError, ValueError):
            if isinstance(known, dist.ProcessGroup) and dist.get_process_group_ranks(known) == ranks:
                return known
    made = _WORLDS[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return made


def refuse_unserved(constructed: registry.Constructed, context: PluginContext, world_size: int) -> None:
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


def policy_choice(choice: PluginChoice) -> PluginChoice:
    # A function that answers for one module is the custom policy's.
    if isinstance(choice, (str, Mapping, WrapPolicy)) or not callable(choice):
        return choice
    if isinstance(choice, type) and issubclass(choice, WrapPolicy):
        return choice
    fault = "it is a class" if isinstance(choice, type) else ""
    # Some callables written in C have no signature; the call itself will tell.
    with suppress(ValueError):
        try:
            inspect.signature(choice).bind(None)
        except TypeError as error:
            fault = fault or str(error)
    if fault:
        raise ConfigError(
            f"policy {choice!r} is no function of a module: {fault}. For a unit of each module of a class, and in the "
            'place of torch\'s policies, write {"name": "module_class", "classes": [...]}.'
        )
    return {"name": "custom", "fn": choice}
