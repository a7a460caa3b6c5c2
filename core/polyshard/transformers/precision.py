"""In which dtype a model trains: what ``TrainingArguments`` say, and what the ``ShardConfig`` says, as one."""

from __future__ import annotations

import dataclasses

from ..config import PluginSpec, ShardConfig
from ..errors import ConfigError

#: Compute dtypes of the built-in plugins that have one, by name.
_COMPUTES = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}


def with_precision(config: ShardConfig, mixed_precision: str) -> ShardConfig:
    """``config`` with the precision that ``TrainingArguments.mixed_precision`` asks for.

    ``mixed_precision``: ``"no"``, ``"bf16"`` or ``"fp16"``. Where ``config`` leaves its precision at ``none``, the
    plugin of that name is taken. A precision that is chosen must compute in it; of plugins that polyshard does not know
    only loss scaling is known, from their capabilities, and only of objects.

    Raises:
        ConfigError: the two differ.
    """
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"TrainingArguments ask for mixed precision {mixed_precision!r}, which PolyshardTrainer does not serve. "
            "Set bf16=True or fp16=True, or neither, and give the ShardConfig a precision plugin."
        )
    choice = PluginSpec.parse(config.precision)
    if isinstance(choice, PluginSpec) and choice.label == "none":
        return config if mixed_precision == "no" else dataclasses.replace(config, precision=mixed_precision)
    computes = _compute_dtype(choice)
    if computes is None:
        return config
    wanted = "fp32" if mixed_precision == "no" else mixed_precision
    if computes != wanted:
        asked = "neither bf16 nor fp16" if mixed_precision == "no" else f"{mixed_precision}=True"
        instead = f"{computes}=True" if computes != "fp32" else "neither"
        raise ConfigError(
            f"The ShardConfig's precision={config.precision!r} computes in {computes}, but TrainingArguments have "
            f"{asked}. Set {instead} there, or leave precision out: it follows TrainingArguments."
        )
    return config


def _compute_dtype(choice: object) -> str | None:
    """``"fp32"``, ``"bf16"`` or ``"fp16"``; None where it is not known."""
    if not isinstance(choice, PluginSpec):
        capabilities = getattr(choice, "capabilities", None)
        return "fp16" if getattr(capabilities, "loss_scaling", False) else None
    if choice.distribution not in (None, "polyshard"):
        return None
    if choice.name != "mixed":
        return _COMPUTES.get(choice.name)
    param = str(choice.options.get("param", "none")).removeprefix("torch.")
    return _SHORT.get(param, param if param in _COMPUTES else "fp32")
