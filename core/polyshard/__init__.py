"""Shards a PyTorch model's parameters, gradients and optimizer state over ranks. What teams differ in is a plugin."""

# [Note: what is imported when]
# Everything is imported with the first name that needs it. The command's help needs neither torch nor what is here; a
# package of plugins and a configuration need the contracts, the errors and the settings, and not the engine, which is
# ten times as many modules.

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import errors, interfaces
    from .api import (
        FullyShardedDataParallel,
        agree_on_use,
        clip_grad_norm_,
        close,
        flat_parameters,
        fully_shard,
        no_all_reduce,
        no_sync,
        plugins,
        register_forward_method,
        report,
        shard,
        skip,
        token_divisor,
        unsharded,
    )
    from .capture.step import CapturedStep, CaptureFallback, CaptureMode
    from .config import ShardConfig, Strategy
    from .functions.memory import MemoryReport
    from .functions.scaler import GradScaler
    from .functions.torch_functions import backward
    from .hookspecs import hookimpl
    from .monitor import Straggler, Stragglers, check_replicas
    from .preemption import Preemption, random_states, restore_random_states, tell_failures
    from .registry import UsedPlugin
    from .state.streaming import load_stream, stream

__all__ = [
    "CaptureFallback",
    "CaptureMode",
    "CapturedStep",
    "FullyShardedDataParallel",
    "GradScaler",
    "MemoryReport",
    "Preemption",
    "ShardConfig",
    "Straggler",
    "Stragglers",
    "Strategy",
    "UsedPlugin",
    "__version__",
    "agree_on_use",
    "backward",
    "check_replicas",
    "clip_grad_norm_",
    "close",
    "errors",
    "flat_parameters",
    "fully_shard",
    "hookimpl",
    "interfaces",
    "load_stream",
    "no_all_reduce",
    "no_sync",
    "plugins",
    "random_states",
    "register_forward_method",
    "report",
    "restore_random_states",
    "shard",
    "skip",
    "stream",
    "tell_failures",
    "token_divisor",
    "unsharded",
]

if not TYPE_CHECKING:
    # Hidden from type checkers, which would take any misspelt name for one that it answers.
    _NAMES = {
        "capture.step": ("CaptureFallback", "CaptureMode", "CapturedStep"),
        "config": ("ShardConfig", "Strategy"),
        "functions.memory": ("MemoryReport",),
        "functions.scaler": ("GradScaler",),
        "functions.torch_functions": ("backward",),
        "hookspecs": ("hookimpl",),
        "monitor": ("Straggler", "Stragglers", "check_replicas"),
        "preemption": ("Preemption", "random_states", "restore_random_states", "tell_failures"),
        "registry": ("UsedPlugin",),
        "state.streaming": ("load_stream", "stream"),
    }
    _HOME = {name: module for module, names in _NAMES.items() for name in names}
    _MODULES = frozenset(
        {"checkpoint", "config", "errors", "hookspecs", "interfaces", "nested", "optim", "pipelining", "state"}
    )

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'api')}"), name)
        # Found without a call the next time.
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
