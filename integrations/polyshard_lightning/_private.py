"""Private names of Lightning: seen in lightning 2.6.0 to 2.6.6. Nothing else here imports a private name.

Classes that are imported: the launchers, which start this script once for each further device where nobody else started
the ranks; the public strategies have no other way to do so.

Hooks that Lightning calls and that have no public name, which the strategies therefore define under these: of both
``_configure_launcher``; of Fabric's ``_set_world_ranks`` and ``_backward_sync_control`` (an object with
``no_backward_sync(module, enabled)``; ``BackwardSyncControl`` is its base); of the Trainer's ``_setup_model`` and
``_layer_sync``. Fabric sets ``_num_nodes``.
"""

from __future__ import annotations

from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricLauncher
from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as TrainerLauncher

__all__ = ["BackwardSyncControl", "FabricLauncher", "TrainerLauncher"]
