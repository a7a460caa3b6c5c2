"""``torch.distributed.fsdp.fully_shard`` over polyshard's engine.

A program that uses it moves over by changing the line that imports it.
"""

from __future__ import annotations

from polyshard_plugins.stand_in import StandIn, stand_in

from ._fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from ._torch_private import places
from .fsdp_module import FSDPModule, GradientReductionHandle, UnshardHandle
from .policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def install() -> StandIn:
    """Let ``torch.distributed.fsdp`` give this package's names to whoever imports FSDP2 from it, from now on.

    ``FullyShardedDataParallel`` and what belongs to it stay torch's.

    Returns:
        What undoes it: by ``undo()``, or as a context manager.

    Raises:
        StateError: done already, or a module has imported torch's functions or ``FSDPModule`` before; names it.
    """
    functions = {
        "FSDPModule": FSDPModule,
        "UnshardHandle": UnshardHandle,
        "fully_shard": fully_shard,
        "register_fsdp_forward_method": register_fsdp_forward_method,
        "share_comm_ctx": share_comm_ctx,
    }
    settings = {
        "GradientReductionHandle": GradientReductionHandle,
        "DataParallelMeshDims": DataParallelMeshDims,
        "MixedPrecisionPolicy": MixedPrecisionPolicy,
    }
    names = {**functions, **settings}
    return stand_in(dict.fromkeys(places(), names), functions, "polyshard_fsdp2.install()")
