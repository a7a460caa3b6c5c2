"""A ``ShardConfig`` beside a trainer's own settings: device, ranks, precision, and engines that exclude polyshard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from polyshard import registry
from polyshard.config import PluginSpec, ShardConfig, Strategy
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PrecisionPlugin, UnitSpec
from torch import nn

#: The names of compute dtypes in ``mixed_precision`` of Accelerate and Transformers, for parameters in fp32.
_NAMES = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: The variables by which Accelerate's launcher asks for another engine.
_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}
_TRUE = ("1", "true", "yes", "on", "y", "t")


def on_device(config: ShardConfig, device: torch.device, trainer: str, rank: int) -> ShardConfig:
    """``config`` with the device that ``trainer`` chose for this process.

    Raises ConfigError: ``config`` names another one.
    """
    if device.type == "cpu":
        # Trainers may number it, and no tensor's has a number.
        device = torch.device("cpu")
    wanted = config.device
    if wanted is not None and (wanted.type != device.type or wanted.index not in (None, device.index)):
        raise ConfigError(
            f"ShardConfig(device='{wanted}') is not the device that {trainer} chose, '{device}' (rank {rank}). Leave "
            f"it out, and choose by {trainer}'s own settings."
        )
    return replace(config, device=device)


def keeps_whole(config: ShardConfig, world_size: int) -> bool:
    """Whether each of ``world_size`` ranks goes on holding whole parameters."""
    return world_size == 1 or config.strategy is Strategy.NO_SHARD


def with_ranks(config: ShardConfig) -> ShardConfig:
    """``config`` for the ranks that there are: a single one where no launcher started the process."""
    if config.collectives != "auto" or config.mesh is not None or (dist.is_available() and dist.is_initialized()):
        return config
    return replace(config, collectives={"name": "fake", "world_size": 1})


def refuse_other_ranks(config: ShardConfig, trainer: str, world_size: int) -> None:
    """Raise ``ConfigError`` where ``config`` shards over other ranks than the ``world_size`` between which ``trainer``
    divides data.
    """
    for name, given in (("mesh", config.mesh), ("collectives", config.collectives)):
        size = getattr(given, "size", None)
        ranks = size() if callable(size) else getattr(given, "world_size", world_size)
        if ranks != world_size:
            raise ConfigError(
                f"The ShardConfig's {name} is of {ranks} ranks, but {trainer} divides its data between {world_size}: "
                "gradients would be the mean over a part of them. Give a mesh or a group of all ranks; for groups "
                "inside of it, a hybrid strategy."
            )


def refuse_engines(environ: Mapping[str, str], trainer: str) -> None:
    """Raise ``ConfigError``, naming the variable, where ``environ`` asks Accelerate for an engine beside polyshard.
    ``trainer``: whose models are sharded.
    """
    for variable, engine in _ENGINES.items():
        if environ.get(variable, "false").lower() in _TRUE:
            raise ConfigError(
                f"The environment asks Accelerate for {engine} ({variable}={environ[variable]}), but polyshard shards "
                f"the models of {trainer}. Launch with torchrun, or with a configuration of accelerate launch that "
                "has no such section."
            )


def leaves_dtype(config: ShardConfig) -> bool:
    """Whether ``config`` leaves parameters in their own dtype, as it does by default."""
    spec = PluginSpec.parse(config.precision)
    return isinstance(spec, PluginSpec) and spec.name == "none"


def compute_dtype(config: ShardConfig, master: torch.dtype = torch.float32) -> torch.dtype:
    """The dtype in which the outermost unit computes, of parameters in ``master``.

    Raises ConfigError, PluginError: the plugin cannot be made.
    """
    unit = UnitSpec(
        name="",
        module_class=nn.Module,
        parameter_names=(),
        numel=0,
        shard_numel=0,
        master_dtype=master,
        device=torch.device("cpu"),
        is_root=True,
    )
    return _precision(config).dtypes(unit).compute


def needs_scaler(config: ShardConfig) -> bool:
    """Whether gradients underflow without a gradient scaler; raises as ``compute_dtype``."""
    return _precision(config).capabilities.loss_scaling


def mixed_precision_of(config: ShardConfig) -> str | None:
    """The ``mixed_precision`` of a trainer that fits: ``"no"``, ``"bf16"``, or ``"fp16"``, which scales the loss.

    None where none of them has the plugin's compute dtype; raises as ``compute_dtype``.
    """
    return "fp16" if needs_scaler(config) else _NAMES.get(compute_dtype(config))


def _precision(config: ShardConfig) -> PrecisionPlugin:
    spec = PluginSpec.parse(config.precision)
    name = spec.name if isinstance(spec, PluginSpec) else ""
    # It is asked for dtypes and casts nothing, so the model's device, which may not be chosen yet, does not matter.
    context = PluginContext(name=name, device=torch.device("cpu"))
    resolved = registry.resolve_setting(config, "precision", config.precision)
    precision: PrecisionPlugin = registry.construct(resolved, context).instance
    return precision
