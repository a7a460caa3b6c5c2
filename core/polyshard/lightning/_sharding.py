"""Sharding of the module that Lightning trains, and what cannot be sharded so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from ..api import fully_shard, shard
from ..config import ShardConfig
from ..errors import AlreadyShardedError, ConfigError, ParameterError
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from ..setup.materialize import Initializer
from ..trainers import sharded as trainers
from ..trainers.device import on_device
from ..trainers.optimizers import refuse_stepped, refuse_strangers
from ..trainers.ranks import keeps_whole, refuse_other_ranks
from ..trainers.wrapped import refuse_wrapped
from ._children import with_children

_SETTINGS = "_polyshard_lightning_settings"


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
        ConfigError: ``config`` names another device or other ranks than Lightning's, or the module was sharded with
            other settings, or has parameters of its own although its children are called by themselves.
        AlreadyShardedError: something else has wrapped it.
        ShardingError, PluginError, RankMismatchError: as ``polyshard.shard``.
    """
    refuse_other_ranks(config, "Lightning", dist.get_world_size())
    config = on_device(config, device, "Lightning", rank)
    refuse_module(module, rank)
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
    if any(MODULE_STATE_ATTRIBUTE in inner.__dict__ for inner in module.modules()):
        _compose(module, config, rank, initializer, calls_children=calls_children)
    else:
        chosen = replace(config, policy=with_children(config.policy)) if calls_children else config
        shard(module, chosen, initializer=initializer)
    module.__dict__[_SETTINGS] = config


def refuse_optimizer(
    optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module], config: ShardConfig, rank: int
) -> None:
    """Refuse an optimizer over other parameters than those of ``modules``, or with state of whole ones that are cut.

    ``modules``: sharded, or about to be, by ``config``.

    Raises:
        ConfigError: naming the parameter.
    """
    refuse_strangers(optimizer, modules, rank, "Make the optimizer from the parameters of the model that is set up.")
    whole = keeps_whole(config, dist.get_world_size())
    to_be_cut = [] if whole else [module for module in modules if not is_sharded(module)]
    refuse_stepped(optimizer, to_be_cut, rank, "Make a new optimizer, and load a checkpoint into it.")


def refuse_module(module: nn.Module, rank: int) -> None:
    """Raise where something else divides the parameters of ``module``, or did.

    Raises:
        AlreadyShardedError: naming the module inside, and what it is.
    """
    refuse_wrapped(module, rank, "Give the model to Lightning as it is: the strategy shards it.")
    if trainers.is_sharded(module) and not is_sharded(module):
        raise AlreadyShardedError(
            f"{type(module).__name__} was sharded before Lightning's strategy came to it (rank {rank}). Leave that to "
            "the strategy: PolyshardStrategy(config), or PolyshardFabricStrategy(config)."
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
