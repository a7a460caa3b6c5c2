"""Models that a failed call left in pieces: every use of one is refused, and says what happened."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import StateError
from ..planning.plan import modules_in

#: Attribute under which such a module holds what happened.
_BROKEN_ATTRIBUTE = "_polyshard_broken"


def mark_broken(model: nn.Module, reason: str) -> None:
    """Refuse every later use of ``model`` and of the modules inside it. ``reason``: what happened, and where."""
    for module in model.modules():
        if _BROKEN_ATTRIBUTE not in module.__dict__:
            module.register_forward_pre_hook(_refuse_forward, prepend=True)
            module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        module.__dict__[_BROKEN_ATTRIBUTE] = reason


def refuse_broken(model: nn.Module, call: str) -> None:
    """Raise if ``model`` or a module inside it is in pieces.

    Raises:
        StateError: naming it, ``call``, and what happened.
    """
    if not any(_BROKEN_ATTRIBUTE in module.__dict__ for module in modules_in(model)):
        return
    for name, module in model.named_modules():
        reason = module.__dict__.get(_BROKEN_ATTRIBUTE)
        if reason is not None:
            where = f"{type(module).__name__}" + (f" ('{name}')" if name else "")
            raise StateError(
                f"{call}: this {where} cannot be used. Sharding it failed when part of its parameters had been let go "
                f"of: {reason}. Remove the cause and build it anew."
            )


def _refuse_forward(module: nn.Module, args: Any) -> None:
    refuse_broken(module, "forward")


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    refuse_broken(module, "state_dict()")
