"""The models and optimizers that a trainer is given: which are sharded, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from polyshard import inspect
from polyshard.checkpoint.contents import require_saveable
from polyshard.errors import AlreadyShardedError, ConfigError, RankMismatchError, UnsupportedError, warn_once
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPERS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallel, "DistributedDataParallel"),
    (DataParallel, "DataParallel"),
    (FullyShardedDataParallel, "torch's FullyShardedDataParallel (FSDP1)"),
    (FSDPModule, "torch's fully_shard (FSDP2)"),
)
#: They stand above this package, and cannot be imported here.
_DROP_INS = ("polyshard_fsdp", "polyshard_fsdp2")
#: Nor are trainers imported here.
_OPTIMIZER_WRAPPERS = ("accelerate.optimizer", "lightning.pytorch.core.optimizer")


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` itself was given to ``polyshard.shard`` or ``fully_shard``, not one around or inside it."""
    return inspect.sharded_model(module) is not None


def sharded_in(module: nn.Module) -> nn.Module | None:
    """The sharded module that ``module`` is, by itself or in polyshard's wrapper; None for others."""
    inner = module._modules.get("module")
    return next((each for each in (module, inner) if each is not None and is_sharded(each)), None)


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that the user made, without the wrappers of Accelerate and Lightning."""
    while any(base.__module__ in _OPTIMIZER_WRAPPERS for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    plain: torch.optim.Optimizer = optimizer
    return plain


def held_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """All that an optimizer of ``model`` may hold: its parameters, and flat ones that stand for those of a unit."""
    yield from model.parameters()
    for unit in inspect.units_in(model):
        if unit.flat_parameter is not None:
            yield unit.flat_parameter


def refuse_wrapped(model: nn.Module, rank: int, remedy: str) -> None:
    """Raise ``AlreadyShardedError`` where ``model`` or a module in it is wrapped by another engine, or was sharded by a
    drop-in of polyshard's.

    ``remedy``: what to do, as sentences.
    """
    for name, module in model.named_modules():
        by = _wrapper_of(module)
        if by is not None:
            raise AlreadyShardedError(
                f"'{name or '(root)'}' of {type(model).__name__} is wrapped already, by {by} (rank {rank}), and its "
                f"parameters would be divided twice. {remedy}"
            )
    named = [(name, each) for name, each in model.named_parameters() if isinstance(each, DTensor)]
    for (name, _), ours in zip(named, inspect.find([each for _, each in named]), strict=True):
        if ours is None:
            raise AlreadyShardedError(
                f"'{name}' of {type(model).__name__} is a DTensor (rank {rank}): its parameters were divided when it "
                f"was made or loaded, and would be divided twice. {remedy}"
            )


def _wrapper_of(module: nn.Module) -> str | None:
    # First: the drop-in's class is one of torch's, too.
    for base in type(module).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _DROP_INS:
            return f"polyshard's drop-in {package}"
    for wrapper, name in _WRAPPERS:
        if isinstance(module, wrapper):
            return name
    return "a drop-in of polyshard's" if inspect.is_sharded(module) and not is_sharded(module) else None


def refuse_strangers(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], rank: int, remedy: str) -> None:
    """Raise ``ConfigError``, naming the parameter, where ``optimizer`` holds a parameter of none of ``models``: nothing
    would reduce its gradient.

    Args:
        optimizer: As the user made it.
        models: Sharded, or about to be.
        rank: Of this process.
        remedy: What to do, as sentences.
    """
    known = {parameter for model in models for parameter in parameters_of(model)}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter in known:
                continue
            alike = next(
                (
                    f" It has the shape of '{name}' of {type(model).__name__}, but is another tensor."
                    for model in models
                    if sharded_in(model) is None
                    for name, own in model.named_parameters()
                    if own.shape == parameter.shape
                ),
                "",
            )
            there = " or ".join(type(model).__name__ for model in models)
            whose = f"is not among the parameters of {there}" if models else "is of no model: there is none"
            raise ConfigError(
                f"Parameter {place} of group {index} of {type(optimizer).__name__}, {tuple(parameter.shape)} on "
                f"{parameter.device}, {whose} (rank {rank}), so its gradient would be this rank's alone.{alike} "
                f"{remedy}"
            )


def warn_unsaveable(
    model: nn.Module, optimizer: torch.optim.Optimizer, call: str, rank: int, *, writes: bool = True
) -> None:
    """Warn, on rank 0, where ``call`` would refuse ``optimizer`` once it has stepped. Every rank calls it.

    For trainers that do not know whether the user will save. ``writes``: as for ``require_saveable``.
    """
    try:
        require_saveable(model, optimizer, "", writes=writes)
    except (ConfigError, RankMismatchError, UnsupportedError) as error:
        warn_once(
            f"{call} will refuse {type(optimizer).__name__}, which can be trained with where nothing is saved but "
            f"the model. {error}",
            rank=rank,
        )
