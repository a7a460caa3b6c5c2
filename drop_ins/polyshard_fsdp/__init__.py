"""A drop-in for ``torch.distributed.fsdp`` (its ``FullyShardedDataParallel`` half) on polyshard's engine.

A script moves over by changing the line that imports it; ``install`` is for programs that cannot be edited.
"""

from __future__ import annotations

from polyshard_plugins.stand_in import StandIn, stand_in

from . import _runtime_utils as _runtime_utils
from . import api, sharded_grad_scaler
from . import wrap as wrap
from ._flat_param import FlatParameter
from .api import *  # noqa: F403
from .fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FlatParameter", "FullyShardedDataParallel", "install"]
__all__ += api.__all__


def install() -> StandIn:
    """Let ``torch.distributed.fsdp`` give the drop-in to whoever imports FSDP from it, from now on.

    Exchanged are the wrapper and ``ShardedGradScaler``, there and in its modules ``sharded_grad_scaler`` and
    ``fully_sharded_data_parallel``. Settings, policies and private functions are torch's own; so is ``fully_shard``.

    Returns:
        What undoes it: by ``undo()``, or as a context manager.

    Raises:
        StateError: done already, or a module has imported torch's wrapper or scaler before; names it.
    """
    import torch.distributed.fsdp as theirs
    import torch.distributed.fsdp.sharded_grad_scaler as their_scaler

    wrapper = {"FullyShardedDataParallel": FullyShardedDataParallel}
    return stand_in(
        {
            theirs: wrapper,
            theirs.fully_sharded_data_parallel: wrapper,
            their_scaler: {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
        },
        ("FullyShardedDataParallel", "ShardedGradScaler"),
        "polyshard_fsdp.install()",
    )
