"""What cannot be served, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..engine.planning.plan import STAGE_ATTRIBUTE, refuse_sharded, refuse_unshardable
from ..engine.step.stage import Stage
from ..errors import AlreadyShardedError, ConfigError, StateError, UnsupportedError
from .sharded import named_parameters_of, root_in, sharded_in

#: Variables by which the launcher asks for an engine of Accelerate's own.
_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}
_WRAPPERS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallel, "DistributedDataParallel"),
    (DataParallel, "DataParallel"),
    (TorchFSDP, "torch's FullyShardedDataParallel (FSDP1)"),
    (FSDPModule, "torch's fully_shard (FSDP2)"),
)


def refuse_other_engines(arguments: Mapping[str, object], environ: Mapping[str, str]) -> None:
    """Raise where ``arguments`` or ``environ`` ask for an engine beside polyshard.

    Raises:
        ConfigError: naming the argument or the variable.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"Accelerator got {name}={type(value).__name__}(...), but polyshard shards the models of this "
                f"Accelerator. Leave {name} out, or use accelerate.Accelerator."
            )
    for variable, engine in _ENGINES.items():
        if environ.get(variable, "false").lower() in ("1", "true", "yes", "on", "y", "t"):
            raise ConfigError(
                f"The environment asks Accelerate for {engine} ({variable}={environ[variable]}), but polyshard shards "
                "the models of this Accelerator. Launch with torchrun, or with a configuration of accelerate launch "
                "that has no such section, or use accelerate.Accelerator."
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
        for name, module in model.named_modules():
            for wrapper, told in _WRAPPERS:
                if isinstance(module, wrapper):
                    raise AlreadyShardedError(
                        f"{described} is wrapped by {told} already, at '{name or '(root)'}' (rank {rank}). Give "
                        "prepare() the model itself."
                    )
            stage = module.__dict__.get(STAGE_ATTRIBUTE)
            if stage is not None and type(stage) is not Stage:
                raise AlreadyShardedError(
                    f"{described} is sharded by a drop-in of polyshard's already, at '{name or '(root)'}', which this "
                    f"Accelerator does not serve (rank {rank}). Give prepare() the model itself, or one that "
                    "polyshard.shard has sharded."
                )
        inner = sharded_in(model)
        if inner is not None:
            root_in(inner).refuse_closed("prepare()")
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
    known = {parameter for model in models for _, parameter in named_parameters_of(model)}
    cut = {parameter: name for model in to_be_cut for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter not in known:
                    _refuse_stranger(kind, index, place, parameter, models, rank)
                if parameter in cut and optimizer.state.get(parameter):
                    raise ConfigError(
                        f"{kind} has taken steps: it has state of the whole '{cut[parameter]}', of which this rank is "
                        f"about to keep a piece (rank {rank}). Prepare a new optimizer, and load its state by "
                        "load_state()."
                    )


def _refuse_stranger(
    kind: str, index: int, place: int, parameter: torch.Tensor, models: Sequence[nn.Module], rank: int
) -> None:
    where = f"{kind}'s parameter {place} of group {index}, {tuple(parameter.shape)} on {parameter.device},"
    if not models:
        raise ConfigError(
            f"{where} is of no model that was prepared (rank {rank}): there is none. Give prepare() the model first, "
            "or together with its optimizer."
        )
    alike = [
        f"'{name}' of {type(model).__name__}"
        for model in models
        if sharded_in(model) is None
        for name, own in model.named_parameters()
        if own.shape == parameter.shape
    ]
    hint = f" It has the shape of {alike[0]}, but is another tensor." if alike else ""
    there = ", ".join(type(model).__name__ for model in models)
    raise ConfigError(
        f"{where} is of no model that is prepared ({there}; rank {rank}).{hint} Make the optimizer over the parameters "
        "of the model that is given to prepare(), and after anything that copies the model."
    )
