"""``fully_shard`` of this package in torch's place, for programs that cannot be edited."""

from __future__ import annotations

from polyshard_plugins.stand_in import StandIn, stand_in

from . import _fully_shard, fsdp_module, policies
from ._torch_private import places

__all__ = ["install"]


def install() -> StandIn:
    """Let ``torch.distributed.fsdp`` give this package's names to whoever imports FSDP2 from it, from now on.

    ``FullyShardedDataParallel`` and what belongs to it stay torch's.

    Returns:
        What undoes it: by ``undo()``, or as a context manager.

    Raises:
        StateError: done already, or a module has imported torch's functions or ``FSDPModule`` before; names it.
    """
    functions = {
        "FSDPModule": fsdp_module.FSDPModule,
        "UnshardHandle": fsdp_module.UnshardHandle,
        "fully_shard": _fully_shard.fully_shard,
        "register_fsdp_forward_method": _fully_shard.register_fsdp_forward_method,
        "share_comm_ctx": _fully_shard.share_comm_ctx,
    }
    settings = {
        "GradientReductionHandle": fsdp_module.GradientReductionHandle,
        "DataParallelMeshDims": policies.DataParallelMeshDims,
        "MixedPrecisionPolicy": policies.MixedPrecisionPolicy,
    }
    names = {**functions, **settings}
    return stand_in(dict.fromkeys(places(), names), functions, "polyshard_fsdp2.install()")
