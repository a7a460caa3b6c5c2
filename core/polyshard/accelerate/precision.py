"""What ``mixed_precision`` means for a configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..config import PluginSpec, ShardConfig
from ..errors import ConfigError, UnsupportedError

#: In which Accelerate's settings a built-in precision computes. ``mixed`` says so by its option ``param``.
_COMPUTES = {"none": "no", "fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"}

_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def asked_for(mixed_precision: str | None, config: ShardConfig, environ: Mapping[str, str]) -> str | None:
    """What Accelerate is to be told: the argument, the environment, or what ``config`` computes in; None for nothing.

    Raises:
        ConfigError: ``config`` computes in something else.
        UnsupportedError: fp8.
    """
    asked = mixed_precision
    if asked is None and environ.get(_VARIABLE, "no").lower() != "no":
        # The launcher sets "no" where the user said nothing.
        asked = environ[_VARIABLE]
    if asked is not None:
        served(str(asked).lower(), config)
        return str(asked).lower()
    computes = computes_in(config)
    return None if computes in (None, "no") else computes


def served(mixed_precision: str, config: ShardConfig) -> ShardConfig:
    """``config`` with the precision that ``mixed_precision`` asks for.

    In place of autocast: parameters are gathered and computed with in the dtype, gradients travel in it and are added
    up in fp32, masters and ``.grad`` stay in the model's own dtype, and outputs of the model are cast to fp32.

    Raises:
        ConfigError: ``config`` names a precision that computes in something else.
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
    computes = computes_in(config)
    if mixed_precision != "no" and config.precision == "none":
        precision = {
            "name": "mixed",
            "param": mixed_precision,
            "reduce": "fp32",
            "overrides": {"": {"output": "fp32"}},
        }
        return dataclasses.replace(config, precision=precision)
    if computes not in (None, mixed_precision):
        raise ConfigError(
            f"Accelerate was asked for mixed_precision={mixed_precision!r}, and ShardConfig.precision is "
            f"{config.precision!r}, which computes in {computes!r}. Leave one of the two out; {_VARIABLE} of the "
            "environment counts as mixed_precision."
        )
    return config


def computes_in(config: ShardConfig) -> str | None:
    """``"no"``, ``"bf16"`` or ``"fp16"``; None for a plugin of which it is not known."""
    spec = PluginSpec.parse(config.precision)
    if not isinstance(spec, PluginSpec) or spec.distribution is not None:
        return None
    if spec.name == "mixed":
        return _DTYPES.get(str(spec.options.get("param")).removeprefix("torch."), "no")
    return _COMPUTES.get(spec.name)
