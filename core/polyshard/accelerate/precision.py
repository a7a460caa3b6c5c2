"""What ``mixed_precision`` means for a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..config import ShardConfig
from ..errors import ConfigError, UnsupportedError
from ..trainers.precision import is_left_out, mixed_precision_of

_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def asked_for(mixed_precision: str | None, config: ShardConfig, environ: Mapping[str, str]) -> str | None:
    """What Accelerate is to be told: the argument, the environment, or what ``config`` computes in; None for nothing.

    Raises:
        ConfigError: ``config`` computes in something else.
        PluginError: its plugin cannot be made.
        UnsupportedError: fp8.
    """
    asked = mixed_precision
    if asked is None and environ.get(_VARIABLE, "no").lower() != "no":
        # The launcher sets "no" where the user said nothing.
        asked = environ[_VARIABLE]
    if asked is not None:
        served(str(asked).lower(), config)
        return str(asked).lower()
    computes = mixed_precision_of(config)
    return None if computes in (None, "no") else computes


def served(mixed_precision: str, config: ShardConfig) -> ShardConfig:
    """``config`` with the precision that ``mixed_precision`` asks for.

    In place of autocast: parameters are gathered and computed with in the dtype, gradients travel in it and are added
    up in fp32, masters and ``.grad`` stay in the model's own dtype, and outputs of the model are cast to fp32.

    Raises:
        ConfigError: ``config`` names a precision that computes in something else.
        PluginError: its plugin cannot be made.
        UnsupportedError: fp8.
    """
    if mixed_precision == "fp8":
        raise UnsupportedError(
            "mixed_precision='fp8' has no counterpart in polyshard, on any rank. Use 'bf16', 'fp16' or 'no'."
        )
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is none of 'no', 'bf16' and 'fp16'. Choose one of them."
        )
    if mixed_precision != "no" and is_left_out(config):
        precision = {
            "name": "mixed",
            "param": mixed_precision,
            "reduce": "fp32",
            "overrides": {"": {"output": "fp32"}},
        }
        return dataclasses.replace(config, precision=precision)
    computes = mixed_precision_of(config)
    if computes not in (None, mixed_precision):
        raise ConfigError(
            f"Accelerate was asked for mixed_precision={mixed_precision!r}, and ShardConfig.precision is "
            f"{config.precision!r}, which computes in {computes!r}. Leave one of the two out; {_VARIABLE} of the "
            "environment counts as mixed_precision."
        )
    return config
