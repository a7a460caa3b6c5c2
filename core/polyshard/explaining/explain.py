"""Explains what a configuration means for a model: what sharding would find out before ranks speak to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from datetime import timedelta

import torch
from torch import nn

from .. import catalog
from ..config import Origin, ShardConfig, Source
from ..errors import ConfigTypeError, WorldSizeError
from ..interfaces import MOST_RANKS, Collectives, PluginContext
from ..planning.groups import rank_lists_for, strategy_for
from ..setup.plugins import compute_device, group_of
from ..setup.shard import Drafted, Request, draft_module
from .explanation import ExplainedPlugin, Explanation, Value
from .plugins import explained_plugin, find
from .stand_ins import Workbench
from .units import explained_units


def explain(
    config: ShardConfig,
    model: nn.Module,
    world_size: int,
    *,
    device: torch.device | str | None = None,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
) -> Explanation:
    """What ``config`` means for ``model`` on ``world_size`` ranks.

    Needs no other ranks, no device and no memory: parameters may be on the meta device, and stay as they are. The
    factories of plugins are called, listeners' aside; collectives and offload managers that need ranks or a device are
    stood in for, and say so in ``ExplainedPlugin.absent``.

    Args:
        config: What to explain. ``source_of`` tells where its values came from.
        model: Any module that ``polyshard.shard`` takes.
        world_size: Number of ranks, of which collectives that the configuration names may know another one.
        device: Where ranks are to compute; None for where ``config`` says or, without that, where the model's
            parameters are. Parameters on the meta device compute on this machine's accelerator, or the CPU. CUDA is
            not asked whether it is there.
        ignored_modules: As for ``polyshard.shard``.
        ignored_parameters: As for ``polyshard.shard``.

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
    placed = dataclasses.replace(config, device=_device(config, model, device, ignored_modules))
    assert placed.device is not None
    _, process_group, mesh = group_of(config)
    context = PluginContext(
        name="",
        device=placed.device,
        process_group=process_group,
        mesh=mesh,
        timeout=timedelta(seconds=config.timeout_s),
    )
    found = find(config, context, Workbench(world_size, catalog.scan()))
    strategy = strategy_for(config, world_size)
    shard_lists, _ = rank_lists_for(config, strategy, world_size)
    shards = len(shard_lists[0])
    # Nothing is initialised: an initializer makes modules welcome that cannot initialise themselves.
    request = Request(model, placed, _unused, ignored_modules, ignored_parameters, composes=False)
    drafted = draft_module(request, found.plugins, strategy, shards)
    return Explanation(
        model=type(model).__name__,
        world_size=world_size,
        shards=shards,
        strategy=strategy,
        device=placed.device,
        settings=_settings(config, device),
        plugins=(*found.explained, *(plugin for each in drafted for plugin in _overriding(each))),
        units=explained_units(drafted, found.policy, found.layout, model),
    )


def _device(
    config: ShardConfig, model: nn.Module, given: torch.device | str | None, ignored_modules: Collection[nn.Module]
) -> torch.device:
    wanted = config if given is None else dataclasses.replace(config, device=given)
    chosen = wanted.device
    if (
        chosen is None
        and not isinstance(config.collectives, Collectives)
        and all(p.is_meta for p in model.parameters())
    ):
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        chosen = accelerator or torch.device("cpu")
    if chosen is None:
        return compute_device(config, model, ignored_modules)
    # The current one of this process would have to be asked of CUDA, which takes memory on a device.
    return torch.device("cuda", 0) if chosen.type == "cuda" and chosen.index is None else chosen


def _unused(module: nn.Module) -> None:
    return None


def _settings(config: ShardConfig, device: torch.device | str | None) -> tuple[Value, ...]:
    values = []
    for field in dataclasses.fields(config):
        value = Value(field.name, getattr(config, field.name), config.source_of(field.name))
        if field.name == "device" and device is not None:
            value = Value("device", torch.device(device), Source(Origin.CODE, "argument device"))
        values.append(value)
    return tuple(values)


def _overriding(each: Drafted) -> list[ExplainedPlugin]:
    label = each.draft.module_state.name or "(root)"
    source = Source(Origin.CODE, "the policy")
    return [
        explained_plugin(constructed, f"{label}: {setting}", lambda option: source)
        for setting, constructed in each.overrides.items()
    ]
