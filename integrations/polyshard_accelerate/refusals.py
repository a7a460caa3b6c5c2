"""Arguments of the Accelerator, refused before anything changes: engines, precision, models, optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, extract_model_from_parallel
from polyshard import inspect
from polyshard.config import ShardConfig
from polyshard.errors import AlreadyShardedError, ConfigError, StateError, UnsupportedError
from polyshard_trainers import models as trainers
from polyshard_trainers.config import leaves_dtype, mixed_precision_of
from polyshard_trainers.models import refuse_strangers, refuse_wrapped
from torch import nn

#: Arguments of theirs that name an engine.
_ENGINES = frozenset(
    {"deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin"}
    | {"parallelism_config"}
)
#: Set by the launcher, to "no" where the user said nothing.
_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def refuse_other_engines(arguments: Mapping[str, object]) -> None:
    """Raise ``ConfigError``, naming the argument, where ``arguments`` ask for an engine beside polyshard."""
    for name, value in arguments.items():
        if name in _ENGINES and value is not None:
            raise ConfigError(
                f"Accelerator got {name}={type(value).__name__}(...), but polyshard shards the models of this "
                f"Accelerator. Leave {name} out, or use accelerate.Accelerator."
            )


def refuse_handlers(handlers: Sequence[object]) -> None:
    """Raise ``ConfigError`` where one of Accelerate's ``KwargsHandler`` asks for what only DDP does, and what changes
    results.
    """
    for handler in handlers:
        hook = handler.comm_hook if isinstance(handler, DistributedDataParallelKwargs) else DDPCommunicationHookType.NO
        if hook != DDPCommunicationHookType.NO:
            raise ConfigError(
                f"DistributedDataParallelKwargs asks for the communication hook {hook.value!r}, but there is no DDP. "
                "Say in ShardConfig.precision what gradients travel in."
            )


def refuse_distributed_type(kind: str, processes: int) -> None:
    """Raise where Accelerate was set up for something that leaves polyshard no place. ``kind``: a ``DistributedType``.

    Raises:
        ConfigError: another engine was chosen by an earlier Accelerator of this process.
        UnsupportedError: XLA.
        StateError: ``torch.distributed`` has ranks that Accelerate does not know of.
    """
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        raise ConfigError(
            f"Accelerate's state in this process is that of {kind}, by an Accelerator that was made earlier. Make this "
            "one first, in a process of its own."
        )
    if kind == "XLA":
        raise UnsupportedError("polyshard does not serve Accelerate on XLA devices. Use CPUs or CUDA devices.")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        if size != processes:
            raise StateError(
                f"torch.distributed has {size} ranks, but Accelerate counts {processes} (rank "
                f"{torch.distributed.get_rank()}): its loaders would give every rank the same batches. Start the "
                "script with torchrun or accelerate launch; for CPU ranks with cpu=True."
            )


def refuse_models(models: Sequence[nn.Module], rank: int) -> None:
    """Raise where a model of ``models`` cannot be sharded, or taken as it is where polyshard has sharded it.

    Raises:
        AlreadyShardedError: it is wrapped by something else, or parts of it are sharded.
        StateError: it was closed.
        ShardingError: a parameter cannot be sharded, or is shared by two of the models.
    """
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for model in models:
        described = type(model).__name__
        refuse_wrapped(model, rank, "Give prepare() the model itself, or one that polyshard.shard has sharded.")
        inner = sharded_in(model)
        if inner is not None:
            _model_of(inner).refuse_ended("prepare()")
            continue
        inspect.refuse_unshardable(model, rank)
        for name, parameter in model.named_parameters():
            other, other_name = owners.setdefault(parameter, (model, name))
            if other is not model:
                raise AlreadyShardedError(
                    f"'{name}' of {described} is also '{other_name}' of {type(other).__name__} (rank {rank}), and each "
                    "model is sharded by itself. Give prepare() one module that holds both."
                )


def refuse_optimizers(optimizers: Sequence[torch.optim.Optimizer], models: Sequence[nn.Module], rank: int) -> None:
    """Raise ``ConfigError`` where an optimizer belongs to none of ``models``, all that are or will be prepared."""
    remedy = (
        "Make the optimizer over the parameters of the model that is given to prepare(), and after anything that "
        "copies the model. One that is made before its model is prepared goes to prepare() together with it."
    )
    if not models:
        remedy = "Give prepare() the model first, or together with its optimizer."
    for optimizer in optimizers:
        refuse_strangers(optimizer, models, rank, remedy)


def asked_for(mixed_precision: str | None, config: ShardConfig, environ: Mapping[str, str]) -> str | None:
    """The ``mixed_precision`` for Accelerate: the argument, the environment, or that of ``config``; None for neither.

    Raises:
        ConfigError: ``config`` computes in something else.
        PluginError: its plugin cannot be made.
        UnsupportedError: fp8.
    """
    asked = mixed_precision
    if asked is None and environ.get(_VARIABLE, "no").lower() != "no":
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
        raise UnsupportedError("mixed_precision='fp8' has no counterpart in polyshard. Use 'bf16', 'fp16' or 'no'.")
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is none of 'no', 'bf16' and 'fp16'. Choose one of them."
        )
    if mixed_precision != "no" and leaves_dtype(config):
        outputs = {"": {"output": "fp32"}}
        precision = {"name": "mixed", "param": mixed_precision, "reduce": "fp32", "overrides": outputs}
        return dataclasses.replace(config, precision=precision)
    computes = mixed_precision_of(config)
    if computes not in (None, mixed_precision):
        raise ConfigError(
            f"Accelerate was asked for mixed_precision={mixed_precision!r}, and ShardConfig.precision is "
            f"{config.precision!r}, which computes in {computes!r}. Leave one of the two out; {_VARIABLE} of the "
            "environment counts as mixed_precision."
        )
    return config


def uncompiled(model: nn.Module) -> nn.Module:
    found: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return found


def sharded_in(model: nn.Module) -> nn.Module | None:
    """The outermost sharded module that ``model`` is: itself, in ``torch.compile``, or in polyshard's wrapper.

    None for others, also for those with sharded modules inside.
    """
    module = trainers.sharded_in(uncompiled(model))
    return module if module is not None and _model_of(module).module is module else None


def refuse_unreduced(parameters: Iterable[torch.Tensor], call: str) -> None:
    """Raise ``StateError``, naming the unit, where gradients of ``parameters`` wait for their reduction."""
    for found in inspect.find(list(parameters)):
        if found is not None and found.unit.awaits_reduction:
            raise StateError(
                f"{call} came while gradients of unit '{found.unit.name}' wait for the last backward of an "
                f"accumulation (rank {found.model.rank}): there is nothing to clip yet. Call it under "
                "`if accelerator.sync_gradients:`."
            )


def _model_of(module: nn.Module) -> inspect.ShardedModel:
    model = inspect.sharded_model(module)
    assert model is not None
    return model
