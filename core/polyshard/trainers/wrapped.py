"""Models whose parameters something else divides already."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import AlreadyShardedError
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from ..runtime.module_state import ModuleState

_WRAPPERS: tuple[tuple[type, str], ...] = (
    (DistributedDataParallel, "DistributedDataParallel"),
    (DataParallel, "DataParallel"),
    (FullyShardedDataParallel, "torch's FullyShardedDataParallel (FSDP1)"),
    (FSDPModule, "torch's fully_shard (FSDP2)"),
)
#: They stand above this package, and cannot be imported here.
_DROP_INS = ("polyshard_fsdp", "polyshard_fsdp2")


def refuse_wrapped(model: nn.Module, rank: int, remedy: str) -> None:
    """Raise where ``model`` or a module in it is wrapped by another engine, or was sharded by a drop-in of polyshard's.

    ``remedy``: what to do, as sentences.

    Raises:
        AlreadyShardedError: naming the module, or the parameter that is a DTensor, and by what.
    """
    for name, module in model.named_modules():
        by = _wrapper_of(module)
        if by is not None:
            raise AlreadyShardedError(
                f"'{name or '(root)'}' of {type(model).__name__} is wrapped already, by {by} (rank {rank}), and its "
                f"parameters would be divided twice. {remedy}"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise AlreadyShardedError(
                f"'{name}' of {type(model).__name__} is a DTensor (rank {rank}): its parameters were divided when it "
                f"was made or loaded, and would be divided twice. {remedy}"
            )


def _wrapper_of(module: nn.Module) -> str | None:
    for wrapper, told in _WRAPPERS:
        if isinstance(module, wrapper):
            return told
    for base in type(module).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _DROP_INS:
            return f"polyshard's drop-in {package}"
    stage = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
    return None if stage is None or type(stage) is ModuleState else "a drop-in of polyshard's"
