"""``generate`` over a sharded model: parameters are gathered once for the whole call."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn

from ..api import outermost_root, register_forward_method
from ..runtime.unit import Reshard


def register_generate(model: nn.Module, name: str = "generate") -> None:
    """Let ``model.generate(...)`` gather each unit once a call, in the dtype in which the model computes.

    A token is a forward of every block. Registered by ``polyshard.register_forward_method`` alone, each would gather
    each block again. Here the first forward of a call gathers, and the call's end releases: whole parameters take the
    model's size in compute dtype meanwhile. After its first forward a call communicates nothing, so ranks may be given
    prompts of different lengths and end at different lengths. All ranks call it, as often.

    Args:
        model: The outermost sharded module, an adapter's wrapper too.
        name: The method that calls the model's forward many times, without gradients.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
        ConfigError: it has no such method.
    """
    outermost_root(model, "register_generate()")
    register_forward_method(model, name)
    method = getattr(model, name)

    @wraps(method)
    def gathered_once(*args: Any, **kwargs: Any) -> Any:
        root = outermost_root(model, f"{name}()")
        before = [unit.reshard_policy for unit in root.units]
        for unit in root.units:
            unit.reshard_policy = Reshard.NEVER
        try:
            # Without a backward to come, all is released when the call ends.
            with torch.no_grad():
                return method(*args, **kwargs)
        finally:
            for unit, policy in zip(root.units, before, strict=True):
                unit.reshard_policy = policy

    setattr(model, name, gathered_once)
