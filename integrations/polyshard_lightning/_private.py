"""Private names of Lightning: seen in lightning 2.6.0 to 2.6.6. Nothing else here imports a private name.

Hooks that Lightning calls and that have no public name, which the strategies therefore define under these: Fabric's
``_backward_sync_control`` (an object with ``no_backward_sync(module, enabled)``; ``BackwardSyncControl`` is its base);
the Trainer's ``_setup_model`` and ``_layer_sync``.
"""

from __future__ import annotations

from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl

__all__ = ["BackwardSyncControl"]
