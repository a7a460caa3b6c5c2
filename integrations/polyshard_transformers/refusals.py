"""Inputs of ``PolyshardTrainer``, refused before anything changes: arguments, precision, model, optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from polyshard.config import ShardConfig
from polyshard.errors import AlreadyShardedError, ConfigError, UnsupportedError
from polyshard.inspect import outermost_model
from polyshard_trainers.config import leaves_dtype, mixed_precision_of
from polyshard_trainers.models import is_sharded, refuse_strangers, refuse_wrapped
from torch import nn
from transformers import Adafactor

#: How values of ``TrainingArguments.optim`` begin whose update of an element depends on others of its parameter.
_WHOLE = ("adafactor", "galore", "apollo", "lomo", "adalomo", "stable_adamw", "grokadamw")

_ENGINE = "is set, and PolyshardTrainer shards the model itself. Leave it out, or use transformers.Trainer."
_EVALUATION = (
    "would change the dtype of sharded parameters. Leave it out: evaluation computes in the precision of training."
)
#: Settings of ``TrainingArguments`` and of TRL's configurations, and why each is refused.
_REFUSED = {
    **dict.fromkeys(("fsdp", "deepspeed", "parallelism_config"), _ENGINE),
    "enable_jit_checkpoint": "saves on each rank behind its own signal: one that was signalled alone, or a step "
    "earlier, would wait for the others in the save. Leave it out, and give the trainer "
    "callbacks=[polyshard_transformers.PreemptionCallback()].",
    "bf16_full_eval": _EVALUATION,
    "fp16_full_eval": _EVALUATION,
    "use_vllm": "hands parameters to vLLM by their names, and each rank holds a part of each. Leave it out: TRL calls "
    "the model's generate, which gathers once a call.",
    "use_transformers_continuous_batching": "generates by another method than generate, and would gather each unit for "
    "each token. Leave it out.",
    "activation_offloading": "moves all that backward needs to the host, gathered parameters as well. Leave it out; "
    "gradient_checkpointing=True keeps less.",
    "torch_compile": "is set, and PolyshardTrainer does not compile. Compile the model's blocks before you give it to "
    "the trainer: for block in model.model.layers: block.compile().",
}
_PLAIN = (
    "Give PolyshardTrainer the plain model, loaded without distributed_config= and tp_plan=; do not call "
    "accelerator.prepare(model) before."
)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def refuse_arguments(args: Any) -> None:
    """Raise ``ConfigError`` where ``TrainingArguments`` ask for another engine, or for something that sharded
    parameters cannot do.
    """
    for name, why in _REFUSED.items():
        if getattr(args, name, False):
            raise ConfigError(f"TrainingArguments.{name} {why}")
    if args.n_gpu > 1:
        raise ConfigError(
            f"One process sees {args.n_gpu} GPUs, over which Trainer would replicate the model. Start one process a "
            "GPU: torchrun --nproc-per-node=... script.py."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end reads the sharded state of a checkpoint, which save_only_model=True leaves out. "
            "Set one of them."
        )


def refuse_whole_optimizers(optim: Any) -> None:
    """Raise ``UnsupportedError`` where ``optim``, of ``TrainingArguments``, names an optimizer that computes with whole
    parameters.
    """
    name = str(getattr(optim, "value", optim))
    if any(name.startswith(each) for each in _WHOLE):
        raise UnsupportedError(
            f"TrainingArguments.optim={name!r} computes with whole parameters, of which each rank holds a part. "
            "Choose one that treats elements alike ('adamw_torch_fused', 'sgd', ...), or set strategy='no_shard'."
        )


def refuse_model(model: nn.Module, config: ShardConfig | None, rank: int) -> None:
    """Raise where ``model`` belongs to another engine, or was sharded by polyshard while ``config`` is given, too.

    Raises:
        AlreadyShardedError: another engine wrapped it, or it is sharded already and ``config`` is given.
        ConfigError: it lies on several devices.
    """
    refuse_wrapped(model, rank, _PLAIN)
    if len(set(getattr(model, "hf_device_map", None) or {})) > 1:
        raise ConfigError(
            "The model was loaded with a device_map over several devices. Load it without device_map: sharding places "
            "the parameters."
        )
    if config is not None and is_sharded(model):
        raise AlreadyShardedError(
            f"This {type(model).__name__} is sharded already, and shard= was given, too. Leave shard out, or give the "
            "trainer the model before it is sharded."
        )


def refuse_optimizer(optimizer: torch.optim.Optimizer | None, model: nn.Module, rank: int, *, whole: bool) -> None:
    """Raise where ``optimizer`` was made over parameters that are not the model's, or computes with whole ones.

    ``whole``: each rank will hold whole parameters.

    Raises:
        ConfigError: it holds others.
        UnsupportedError: it is the Adafactor of Transformers.
    """
    if optimizer is None:
        return
    if isinstance(optimizer, Adafactor) and not whole:
        refuse_whole_optimizers("adafactor")
    refuse_strangers(
        optimizer,
        [model],
        rank,
        "Make the optimizer in optimizers=(...) over the parameters of the model that the trainer is given.",
    )


def refuse_other_precision(model: nn.Module, mixed_precision: str) -> None:
    """Raise ``ConfigError``, naming both, where a model that is sharded already computes in another dtype than
    ``TrainingArguments`` ask for.
    """
    units = outermost_model(model, "PolyshardTrainer").units
    computes = {_NAMES.get(unit.compute_dtype, "fp32"): unit.compute_dtype != unit.master.dtype for unit in units}
    casts = any(computes.get(name, False) for name in _NAMES.values())
    if casts if mixed_precision == "no" else mixed_precision not in computes:
        raise ConfigError(
            f"This {type(model).__name__} was sharded to compute in {' and '.join(sorted(computes))}, but "
            f"TrainingArguments ask for mixed precision {mixed_precision!r}. Shard it with that precision, or set "
            "bf16= and fp16= to what it computes in."
        )


def refuse_dropped_layers(model: nn.Module) -> None:
    """Raise ``UnsupportedError``, naming the setting, where ranks would drop different layers at random: each waits for
    the others in a gather.
    """
    config = getattr(model, "config", None)
    for name, value in _settings(config):
        if name.endswith("layerdrop") and isinstance(value, float) and value > 0:
            raise UnsupportedError(
                f"{type(config).__name__}.{name}={value} lets each rank drop other layers at random, but every rank "
                f"must run the same units in the same order. Set {name}=0.0 in the model's configuration."
            )


def _settings(config: Any) -> Iterator[tuple[str, object]]:
    """Settings of a model's configuration and of those inside it, with dotted names."""
    if config is None:
        return
    table = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    waiting: list[tuple[str, Any]] = list(table.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{inner}", each) for inner, each in value.items()]
        else:
            yield name, value


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
    if leaves_dtype(config):
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
