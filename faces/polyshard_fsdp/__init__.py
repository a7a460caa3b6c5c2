"""A drop-in for ``torch.distributed.fsdp`` (its ``FullyShardedDataParallel`` half) on polyshard's engine.

A script moves over by changing the line that imports it; ``install`` is for programs that cannot be edited.
"""

from __future__ import annotations

from polyshard_plugins.stand_in import StandIn, stand_in

from . import _runtime_utils, _torch_private, api, sharded_grad_scaler, wrap
from ._flat_param import FlatParameter
from .api import *  # noqa: F403
from .fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FlatParameter", "FullyShardedDataParallel", "install"]
__all__ += api.__all__


def install() -> StandIn:
    """Let ``torch.distributed.fsdp`` give the drop-in to whoever imports FSDP from it, from now on.

    Exchanged are the wrapper, ``ShardedGradScaler``, ``wrap`` and ``enable_wrap``, there and in its modules ``wrap``,
    ``sharded_grad_scaler`` and ``fully_sharded_data_parallel``; and of its private functions ``_lazy_init``, which
    trainers call. Settings and policies are torch's own, and ``fully_shard`` stays torch's.

    Returns:
        What undoes it: by ``undo()``, or as a context manager.

    Raises:
        StateError: done already, or a module has imported torch's wrapper or scaler before; names it.
    """
    import torch.distributed.fsdp as theirs
    import torch.distributed.fsdp.sharded_grad_scaler as their_scaler
    import torch.distributed.fsdp.wrap as their_wrap

    wrapper = {"FullyShardedDataParallel": FullyShardedDataParallel}
    return stand_in(
        {
            theirs: wrapper,
            theirs.fully_sharded_data_parallel: wrapper,
            their_wrap: {"enable_wrap": wrap.enable_wrap, "wrap": wrap.wrap},
            their_scaler: {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
            _torch_private.runtime_utils: {"_lazy_init": _runtime_utils._lazy_init},
        },
        ("FullyShardedDataParallel", "ShardedGradScaler", "_lazy_init"),
        "polyshard_fsdp.install()",
    )
