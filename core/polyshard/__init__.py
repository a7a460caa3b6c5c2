"""Shards a PyTorch model's parameters, gradients and optimizer state over ranks. What teams differ in is a plugin."""

from . import errors, interfaces
from ._version import __version__
from .capture import CapturedStep, CaptureFallback, CaptureMode
from .catalog import UsedPlugin
from .composable import (
    as_dtensor,
    clip_grad_norm_,
    close,
    flat_parameters,
    fully_shard,
    load_local_state_dict,
    local_state_dict,
    no_sync,
    placement,
    plugins,
    register_forward_method,
    report,
    shard,
    unsharded,
)
from .config import ShardConfig, Strategy
from .engine.surface.placement import Placement
from .engine.surface.report import MemoryReport
from .hookspecs import hookimpl
from .wrapper import FullyShardedDataParallel

__all__ = [
    "CaptureFallback",
    "CaptureMode",
    "CapturedStep",
    "FullyShardedDataParallel",
    "MemoryReport",
    "Placement",
    "ShardConfig",
    "Strategy",
    "UsedPlugin",
    "__version__",
    "as_dtensor",
    "clip_grad_norm_",
    "close",
    "errors",
    "flat_parameters",
    "fully_shard",
    "hookimpl",
    "interfaces",
    "load_local_state_dict",
    "local_state_dict",
    "no_sync",
    "placement",
    "plugins",
    "register_forward_method",
    "report",
    "shard",
    "unsharded",
]
