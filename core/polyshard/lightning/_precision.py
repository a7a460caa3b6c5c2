"""Lightning's precision as ``ShardConfig.precision``; two that differ are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..config import ShardConfig
from ..errors import ConfigError
from ..trainers.precision import compute_dtype, is_left_out, needs_scaler

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_FULL = "32-true"
_SERVED = (_FULL, *_MIXED, *_TRUE)
# Mean and variance of a batch are of no use in 16 bits, and kernels want weights and running statistics in one dtype.
_BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]


def with_precision(config: ShardConfig, plugin: object, served: tuple[type, ...]) -> ShardConfig:
    """``config`` with the precision that Lightning's ``plugin`` stands for, where it names none itself.

    Lightning's ``32-true`` cannot be told from no precision at all, and leaves the choice to ``config``.

    Args:
        config: What the user gave to the strategy.
        plugin: Lightning's precision plugin.
        served: The classes of plugins that do nothing beside autocast, casts of inputs and gradient scaling.

    Raises:
        ConfigError: another kind of plugin, or ``config.precision`` says something else.
    """
    name = getattr(plugin, "precision", None)
    if type(plugin) not in served or name not in _SERVED:
        raise ConfigError(
            f"Lightning's precision plugin {type(plugin).__name__} (precision={name!r}) is not served by polyshard. "
            f"Choose one of {', '.join(map(repr, _SERVED))}, or leave Lightning's precision out and set "
            "ShardConfig(precision=...)."
        )
    if name == _FULL:
        if needs_scaler(config):
            raise ConfigError(
                f"ShardConfig(precision={config.precision!r}) computes in fp16, whose gradients underflow without a "
                "gradient scaler, and Lightning makes one for precision='16-mixed' alone. Give that to Lightning, too, "
                "or choose 'bf16'."
            )
        return config
    if name in _TRUE:
        _require(config, name, compute_dtype(config, _TRUE[name]), _TRUE[name])
        return config
    if is_left_out(config):
        return replace(config, precision=_mixed(_MIXED[name]))
    _require(config, name, compute_dtype(config), _MIXED[name])
    return config


def _mixed(dtype: torch.dtype) -> Mapping[str, Any]:
    """Computes in ``dtype`` under Lightning's autocast, and adds up gradients in fp32."""
    # What the model is called with stays as it is, as in Lightning without shards: targets, too, are among it.
    outermost = {"cast_inputs": False, "cast_root_inputs": False}
    return {
        "name": "mixed",
        "param": dtype,
        "reduce": torch.float32,
        "leave_alone": _BATCH_NORMS,
        "overrides": {"": outermost},
    }


def _require(config: ShardConfig, name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    if found is not wanted:
        raise ConfigError(
            f"Lightning's precision={name!r} computes in {wanted}, but ShardConfig(precision={config.precision!r}) in "
            f"{found}. Say it in one place: leave one of the two out."
        )
