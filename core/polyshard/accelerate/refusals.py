"""What cannot be served, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

from ..errors import AlreadyShardedError, ConfigError, StateError, UnsupportedError
from ..planning.plan import refuse_sharded, refuse_unshardable
from ..trainers.optimizers import refuse_stepped, refuse_strangers
from ..trainers.wrapped import refuse_wrapped
from .sharded import root_in, sharded_in


def refuse_other_engines(arguments: Mapping[str, object]) -> None:
    """Raise where ``arguments`` ask for an engine beside polyshard.

    Raises:
        ConfigError: naming the argument.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"Accelerator got {name}={type(value).__name__}(...), but polyshard shards the models of this "
                f"Accelerator. Leave {name} out, or use accelerate.Accelerator."
            )


def refuse_handlers(handlers: Sequence[object]) -> None:
    """Raise where one of Accelerate's ``KwargsHandler`` asks for what only DDP does, and what changes results.

    Raises:
        ConfigError: a communication hook.
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
            root_in(inner).refuse_ended("prepare()")
            continue
        refuse_sharded(model, rank)
        refuse_unshardable(model, ignored_modules=(), ignored_parameters=(), rank=rank)
        for name, parameter in model.named_parameters():
            other, other_name = owners.setdefault(parameter, (model, name))
            if other is not model:
                raise AlreadyShardedError(
                    f"'{name}' of {described} is also '{other_name}' of {type(other).__name__} (rank {rank}), and each "
                    "model is sharded by itself. Give prepare() one module that holds both."
                )


def refuse_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[nn.Module],
    to_be_cut: Iterable[nn.Module],
    rank: int,
) -> None:
    """Raise where an optimizer is none of ``models``'.

    Args:
        optimizers: As the user made them.
        models: All that are prepared or about to be.
        to_be_cut: Those of them whose parameters are about to become pieces.
        rank: Of this process.

    Raises:
        ConfigError: an optimizer holds a parameter of no model, or state of whole parameters that are about to be cut.
    """
    remedy = (
        "Make the optimizer over the parameters of the model that is given to prepare(), and after anything that "
        "copies the model."
    )
    if not models:
        remedy = "Give prepare() the model first, or together with its optimizer."
    cut = list(to_be_cut)
    for optimizer in optimizers:
        refuse_strangers(optimizer, models, rank, remedy)
        refuse_stepped(optimizer, cut, rank, "Prepare a new optimizer, and load its state by load_state().")
