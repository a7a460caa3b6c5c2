"""In which dtype a model trains: what ``TrainingArguments`` say, and what the ``ShardConfig`` says, as one."""

from __future__ import annotations

import dataclasses

from ..config import ShardConfig
from ..errors import ConfigError
from ..trainers.precision import is_left_out, mixed_precision_of


def with_precision(config: ShardConfig, mixed_precision: str) -> ShardConfig:
    """``config`` with the precision that ``TrainingArguments.mixed_precision`` asks for.

    ``mixed_precision``: ``"no"``, ``"bf16"`` or ``"fp16"``. Where ``config`` leaves its precision at ``none``, the
    plugin of that name is taken. A precision that is chosen must compute in it; of plugins that compute in something
    else than the three, nothing is asked.

    Raises:
        ConfigError: the two differ.
        PluginError: the ``ShardConfig``'s plugin cannot be made.
    """
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"TrainingArguments ask for mixed precision {mixed_precision!r}, which PolyshardTrainer does not serve. "
            "Set bf16=True or fp16=True, or neither, and give the ShardConfig a precision plugin."
        )
    if is_left_out(config):
        return config if mixed_precision == "no" else dataclasses.replace(config, precision=mixed_precision)
    computes = mixed_precision_of(config)
    if computes not in (None, mixed_precision):
        asked = "neither bf16 nor fp16" if mixed_precision == "no" else f"{mixed_precision}=True"
        instead = f"{computes}=True" if computes != "no" else "neither"
        raise ConfigError(
            f"The ShardConfig's precision={config.precision!r} computes in {'fp32' if computes == 'no' else computes}, "
            f"but TrainingArguments have {asked}. Set {instead} there, or leave precision out: it follows "
            "TrainingArguments."
        )
    return config
