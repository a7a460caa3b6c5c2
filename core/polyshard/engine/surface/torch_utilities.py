"""What torch's own functions must know of sharded models: put in place when the first model is sharded."""

from __future__ import annotations

import threading
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..step.root import Root
from ..step.unit import Unit
from .gradient_utilities import GradientUtilities
from .live_roots import live_roots
from .optimizer_check import OptimizerCheck
from .state_dicts import guard_state_dicts

_installing = threading.Lock()
_checks: list[OptimizerCheck] = []
_guarded: WeakSet[Unit] = WeakSet()


def follow(root: Root) -> None:
    """Let torch's functions for gradients and its optimizers find the parameters of ``root``; guard its state dicts.

    Functions are exchanged and the hook of optimizers is set once in a process, and never by an import: see
    [Note: torch's functions].
    """
    with _installing:
        if not _checks:
            GradientUtilities(live_roots).install()
            _checks.append(OptimizerCheck(live_roots))
            register_optimizer_step_pre_hook(_checks[0].before_step)
        _checks[0].forget()
        live_roots.add(root)
        # What is part of a larger model from now on has its guards.
        new = [unit for unit in root.units if unit not in _guarded]
        _guarded.update(new)
    guard_state_dicts(new)
