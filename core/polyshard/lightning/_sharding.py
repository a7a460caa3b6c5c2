"""Sharding of the module that Lightning trains, and what cannot be sharded so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from ..composable import fully_shard, shard
from ..config import ShardConfig
from ..engine.cutting.materialize import Initializer
from ..engine.planning.plan import STAGE_ATTRIBUTE
from ..errors import AlreadyShardedError, ConfigError, ParameterError
from ._children import with_children

_SETTINGS = "_polyshard_lightning_settings"
_OTHERS = (FullyShardedDataParallel, FSDPModule, DistributedDataParallel)


def is_sharded(module: nn.Module) -> bool:
    """Whether a strategy of this package sharded ``module``."""
    return _SETTINGS in module.__dict__


def shard_once(
    module: nn.Module,
    config: ShardConfig,
    device: torch.device,
    rank: int,
    *,
    initializer: Initializer | None,
    calls_children: bool,
) -> None:
    """Shard ``module`` in place, unless a strategy with equal settings has.

    Args:
        module: Not sharded; or sharded here before; or with modules inside that the user gave to ``fully_shard``.
        config: With Lightning's precision in it.
        device: This process's.
        rank: This process's, for errors.
        initializer: As for ``polyshard.shard``.
        calls_children: Whether the module's children are called by themselves, outside of its forward: each of them
            then is a unit of its own.

    Raises:
        ConfigError: ``config`` names another device than Lightning's, or the module was sharded with other settings,
            or has parameters of its own although its children are called by themselves.
        AlreadyShardedError: something else has wrapped it.
        ShardingError, PluginError, RankMismatchError: as ``polyshard.shard``.
    """
    config = _on_device(config, device, rank)
    refuse_wrapped(module, rank)
    known: ShardConfig | None = module.__dict__.get(_SETTINGS)
    if known is not None:
        _require_equal(known, config, module, rank)
        return
    if calls_children:
        _refuse_own_parameters(module, rank)
    for metric in module.modules():
        # Their states are neither parameters nor buffers.
        if isinstance(metric, Metric):
            metric.to(device)
    if any(STAGE_ATTRIBUTE in inner.__dict__ for inner in module.modules()):
        _compose(module, config, rank, initializer, calls_children=calls_children)
    else:
        chosen = replace(config, policy=with_children(config.policy)) if calls_children else config
        shard(module, chosen, initializer=initializer)
    module.__dict__[_SETTINGS] = config


def names_of_parameters(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """Names of the parameters that each one stands for, by its identity: several, for a unit's flat parameter.

    It has all that an optimizer of ``module`` may hold.
    """
    known: dict[int, tuple[str, ...]] = {id(parameter): (name,) for name, parameter in module.named_parameters()}
    for inner in module.modules():
        stage = inner.__dict__.get(STAGE_ATTRIBUTE)
        for unit in stage.units if stage is not None else ():
            if unit.flat is not None:
                known[id(unit.flat.parameter)] = tuple(parameter.names[0] for parameter in unit.parameters)
    return known


def require_parameters_of(optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module], rank: int) -> None:
    """Refuse an optimizer over other parameters than those of ``modules``: nothing would reduce their gradients.

    Raises:
        ConfigError: naming the parameter.
    """
    known: set[int] = set()
    names = []
    for module in modules:
        known.update(names_of_parameters(module))
        names.append(type(module).__name__)
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ConfigError(
                    f"Parameter {position} of group {index} of {type(optimizer).__name__}, of shape "
                    f"{tuple(parameter.shape)}, is not among the parameters of {' or '.join(names)} that were sharded "
                    f"(rank {rank}), so its gradient would be this rank's alone. Make the optimizer from the "
                    "parameters of the model that is set up."
                )


def _on_device(config: ShardConfig, device: torch.device, rank: int) -> ShardConfig:
    if config.device is None:
        return replace(config, device=device)
    wanted = config.device
    if wanted.type != device.type or wanted.index not in (None, device.index):
        raise ConfigError(
            f"ShardConfig(device='{wanted}') is not the device that Lightning chose, '{device}' (rank {rank}). Leave "
            "it out, and choose by accelerator and devices."
        )
    return replace(config, device=device)


def refuse_wrapped(module: nn.Module, rank: int) -> None:
    """Raise where something else divides the parameters of ``module``, or did.

    Raises:
        AlreadyShardedError: naming the module inside, and what it is.
    """
    if STAGE_ATTRIBUTE in module.__dict__ and not is_sharded(module):
        raise AlreadyShardedError(
            f"{type(module).__name__} was sharded before Lightning's strategy came to it (rank {rank}). Leave that to "
            "the strategy: PolyshardStrategy(config), or PolyshardFabricStrategy(config)."
        )
    for name, inner in module.named_modules():
        # The drop-in stands above this package and cannot be imported here.
        drops_in = type(inner).__module__.partition(".")[0] in ("polyshard_fsdp", "polyshard_fsdp2")
        if isinstance(inner, _OTHERS) or drops_in:
            raise AlreadyShardedError(
                f"'{name or '(root)'}' of {type(module).__name__} is wrapped already, by {type(inner).__module__}."
                f"{type(inner).__name__} (rank {rank}), and its parameters would be divided twice. Give the model to "
                "Lightning as it is: the strategy shards it."
            )


def _require_equal(known: ShardConfig, config: ShardConfig, module: nn.Module, rank: int) -> None:
    different = [each.name for each in fields(config) if getattr(known, each.name) != getattr(config, each.name)]
    if different:
        raise ConfigError(
            f"This {type(module).__name__} was sharded with other settings ({', '.join(different)}) by a strategy "
            f"before (rank {rank}), and stays as it was. Use equal settings, or build the model anew."
        )


def _refuse_own_parameters(module: nn.Module, rank: int) -> None:
    own = next((name for name, parameter in module.named_parameters(recurse=False) if parameter is not None), None)
    if own is not None:
        raise ParameterError(
            f"'{own}' lies directly in {type(module).__name__}, whose training_step optimizes manually and so runs "
            f"where that is a piece of the parameter (rank {rank}). Put it into a submodule, and call that."
        )


def _compose(
    module: nn.Module, config: ShardConfig, rank: int, initializer: Initializer | None, *, calls_children: bool
) -> None:
    if config.policy != "never":
        raise ConfigError(
            f"Modules inside {type(module).__name__} are sharded by fully_shard already, so policy={config.policy!r} "
            f"has no meaning (rank {rank}). Leave policy out of the strategy's ShardConfig."
        )
    if calls_children:
        raise ConfigError(
            f"{type(module).__name__} optimizes manually, and modules inside it are sharded by fully_shard already "
            f"(rank {rank}). Leave sharding to the strategy: it makes a unit of each child."
        )
    fully_shard(module, config, initializer=initializer)
