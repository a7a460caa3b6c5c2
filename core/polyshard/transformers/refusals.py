"""What ``PolyshardTrainer`` refuses, by name, before it changes anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Adafactor

from ..api import outermost_root
from ..config import ShardConfig
from ..errors import AlreadyShardedError, ConfigError, UnsupportedError
from ..trainers.optimizers import refuse_stepped, refuse_strangers
from ..trainers.sharded import is_sharded
from ..trainers.wrapped import refuse_wrapped

#: How values of ``TrainingArguments.optim`` begin whose update of an element depends on others of its parameter.
_WHOLE = ("adafactor", "galore", "apollo", "lomo", "adalomo", "stable_adamw", "grokadamw")

_PLAIN = (
    "Give PolyshardTrainer the plain model, loaded without distributed_config= and tp_plan=; do not call "
    "accelerator.prepare(model) before."
)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def refuse_arguments(args: Any) -> None:
    """Raise where ``TrainingArguments`` ask for what another engine does, or what sharded parameters cannot do.

    Raises:
        ConfigError: two engines are asked for, or a setting that needs whole parameters.
    """
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments.{name} is set, and PolyshardTrainer shards the model itself. Leave {name} out, or "
                "use transformers.Trainer."
            )
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "TrainingArguments.enable_jit_checkpoint saves on each rank behind its own signal: one that was signalled "
            "alone, or a step earlier, would wait for the others in the save. Leave it out, and give the trainer "
            "callbacks=[polyshard.transformers.PreemptionCallback()]."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"One process sees {args.n_gpu} GPUs, over which Trainer would replicate the model. Start one process a "
            "GPU: torchrun --nproc-per-node=... script.py."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name, False):
            raise ConfigError(
                f"TrainingArguments.{name} would change the dtype of sharded parameters. Leave it out: evaluation "
                "computes in the precision of training."
            )
    if args.torch_compile:
        raise ConfigError(
            "TrainingArguments.torch_compile is set, and PolyshardTrainer does not compile. Compile the model's blocks "
            "before you give it to the trainer: for block in model.model.layers: block.compile()."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end reads the sharded state of a checkpoint, which save_only_model=True leaves out. "
            "Set one of them."
        )


def refuse_whole_optimizers(optim: Any) -> None:
    """Raise where ``optim``, of ``TrainingArguments``, names an optimizer that computes with whole parameters.

    Raises:
        UnsupportedError: it does.
    """
    name = str(getattr(optim, "value", optim))
    if any(name.startswith(each) for each in _WHOLE):
        raise UnsupportedError(
            f"TrainingArguments.optim={name!r} computes with whole parameters, of which each rank holds a piece. "
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
        ConfigError: it holds others, or has state of whole parameters that are about to be cut.
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
        "Make the optimizer in optimizers=(...) over the parameters of the model that the trainer is given: sharding "
        "keeps these objects.",
    )
    to_be_cut = [] if whole or is_sharded(model) else [model]
    refuse_stepped(optimizer, to_be_cut, rank, "Give the trainer a new optimizer, or a checkpoint to resume from.")


def refuse_other_precision(model: nn.Module, mixed_precision: str) -> None:
    """Raise where a model that is sharded already computes in another dtype than ``TrainingArguments`` ask for.

    Raises:
        ConfigError: naming both.
    """
    units = outermost_root(model, "PolyshardTrainer").units
    computes = {
        _NAMES.get(unit.dtypes.compute, "fp32"): unit.dtypes.compute != unit.spec.master_dtype for unit in units
    }
    casts = any(computes.get(name, False) for name in _NAMES.values())
    if casts if mixed_precision == "no" else mixed_precision not in computes:
        raise ConfigError(
            f"This {type(model).__name__} was sharded to compute in {' and '.join(sorted(computes))}, but "
            f"TrainingArguments ask for mixed precision {mixed_precision!r}. Shard it with that precision, or set "
            "bf16= and fp16= to what it computes in."
        )


def refuse_dropped_layers(model: nn.Module) -> None:
    """Raise where ranks would drop different layers at random: each waits for the others in a gather.

    Raises:
        UnsupportedError: naming the setting.
    """
    config = getattr(model, "config", None)
    for name, value in _settings(config):
        if name.endswith("layerdrop") and isinstance(value, float) and value > 0:
            raise UnsupportedError(
                f"{type(config).__name__}.{name}={value} lets each rank drop other layers at random, but every rank "
                f"must run the same units in the same order. Set {name}=0.0 in the model's configuration."
            )


def _settings(config: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
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
