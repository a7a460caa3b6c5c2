"""What a configuration's precision computes in, as its plugin says, for trainers that have a setting of their own."""

from __future__ import annotations

import torch
from torch import nn

from .. import registry
from ..config import PluginSpec, ShardConfig
from ..interfaces import Group, PluginContext, PrecisionCaster, UnitSpec

#: As Accelerate's and Transformers' ``mixed_precision`` names them, for parameters in fp32.
_NAMES = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


def is_left_out(config: ShardConfig) -> bool:
    """Whether ``config`` leaves parameters in their own dtype, as it does where nobody says anything."""
    spec = PluginSpec.parse(config.precision)
    return isinstance(spec, PluginSpec) and spec.name == "none"


def compute_dtype(config: ShardConfig, master: torch.dtype = torch.float32) -> torch.dtype:
    """In which dtype the outermost unit computes, of parameters in ``master``.

    Raises:
        ConfigError, PluginError: the plugin cannot be made.
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
    return _caster(config).dtypes(unit).compute


def needs_scaler(config: ShardConfig) -> bool:
    """Whether gradients underflow without a gradient scaler.

    Raises:
        ConfigError, PluginError: as ``compute_dtype``.
    """
    return _caster(config).capabilities.loss_scaling


def mixed_precision_of(config: ShardConfig) -> str | None:
    """What a trainer's ``mixed_precision`` has to be: ``"no"``, ``"bf16"``, or ``"fp16"``, which scales the loss.

    None where none of them says what the plugin computes in.

    Raises:
        ConfigError, PluginError: as ``compute_dtype``.
    """
    return "fp16" if needs_scaler(config) else _NAMES.get(compute_dtype(config))


def _caster(config: ShardConfig) -> PrecisionCaster:
    spec = PluginSpec.parse(config.precision)
    name = spec.name if isinstance(spec, PluginSpec) else ""
    # Dtypes are asked for, nothing is cast: the model's device, which may not be chosen yet, does not matter.
    context = PluginContext(name=name, device=torch.device("cpu"))
    return registry.construct(registry.resolve(Group.PRECISION, config.precision), context).instance
