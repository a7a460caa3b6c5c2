"""The drop-in in torch's place, for programs that cannot be edited."""

from __future__ import annotations

from typing import Any

from polyshard_plugins.stand_in import StandIn, stand_in

from . import api, fully_sharded_data_parallel, sharded_grad_scaler, wrap

__all__ = ["install"]


def install() -> StandIn:
    """Let ``torch.distributed.fsdp`` give the drop-in to whoever imports FSDP from it, from now on.

    Exchanged are the wrapper, ``ShardedGradScaler``, settings, policies and ``wrap``, there and in its modules ``api``,
    ``wrap``, ``sharded_grad_scaler`` and ``fully_sharded_data_parallel``. ``fully_shard`` stays torch's.

    Returns:
        What undoes it: by ``undo()``, or as a context manager.

    Raises:
        StateError: done already, or a module has imported torch's wrapper or scaler before; names it.
    """
    # Late: they take longer to import than everything here.
    import torch.distributed.fsdp as theirs
    import torch.distributed.fsdp.sharded_grad_scaler as their_scaler
    import torch.distributed.fsdp.wrap as their_policies

    settings = _named(api)
    wrapper = {**settings, **_named(fully_sharded_data_parallel)}
    return stand_in(
        {
            theirs: wrapper,
            theirs.fully_sharded_data_parallel: wrapper,
            theirs.api: settings,
            their_policies: _named(wrap),
            their_scaler: {"ShardedGradScaler": sharded_grad_scaler.ShardedGradScaler},
        },
        # Settings and policies of torch's own are taken wherever these are.
        ("FullyShardedDataParallel", "ShardedGradScaler"),
        "polyshard_fsdp.install()",
    )


def _named(module: Any) -> dict[str, Any]:
    return {name: vars(module)[name] for name in module.__all__}
