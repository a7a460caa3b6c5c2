"""Calls of modules that would compute with pieces: what ``generate`` and the like do outside of any forward.

Between steps the outermost module's own parameters are 1-D pieces. A method beside ``forward`` that calls the modules
that hold them would fail inside of torch ("'weight' must be 2-D") or, with a bias alone, compute something else. Each
of these modules refuses to be called then. While a forward runs they have no hook, which every call would pay for.
Modules inside of other units are left out: there are many, and what calls them is nearly always the unit's forward.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

from torch import nn

from ...errors import UnshardedUseError
from .. import _torch_private
from .stage import Stage
from .step import Step

#: Under which the hooks stand; torch's own keys are numbers.
_KEY = "polyshard"
#: What a method calls that computes gradients; ``manual_backward`` is Lightning's.
_DIFFERENTIATES = frozenset({"backward", "manual_backward"})


class Resting:
    """Lets the modules that hold the outermost stage's parameters refuse calls between steps."""

    def __init__(self, step: Step, stages: Sequence[Stage]) -> None:
        outermost = stages[0]
        # These gather when they are called.
        gathering = {stage.module for stage in stages}
        # Without shards, modules hold whole parameters at all times.
        sites = [
            (*site, parameter.original)
            for unit in outermost.units
            if unit.grid.shard is not None
            for parameter in unit.parameters
            for site in parameter.sites
        ]
        refusals: dict[nn.Module, _Refusal] = {}
        for module, key, original in sites:
            if module not in gathering:
                refusals.setdefault(module, _Refusal(step, outermost.module, key, original))
        self._hooks = [(_torch_private.forward_pre_hooks(module), refusal) for module, refusal in refusals.items()]
        self.enter()

    def enter(self) -> None:
        """No forward runs any more."""
        for hooks, refusal in self._hooks:
            hooks[_KEY] = refusal

    def leave(self) -> None:
        """A forward starts, or another root takes over."""
        for hooks, _ in self._hooks:
            hooks.pop(_KEY, None)


@dataclass(eq=False, slots=True)
class _Refusal:
    """The hook of one module."""

    step: Step
    owner: nn.Module
    key: str
    original: nn.Parameter

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # A checkpoint around the whole model computes with views inside of a backward.
        if self.step.unsharded or module._parameters.get(self.key) is not self.original:
            return
        name = next((name for name, each in self.owner.named_modules() if each is module), "")
        method = _method_of(self.owner)
        called = f"by {type(self.owner).__name__}.{method} " if method else ""
        raise UnshardedUseError(
            f"'{name}' ({type(module).__name__}) was called {called}outside of the model's forward, while its "
            f"{self.key} is sharded (rank {self.step.rank}). Let the method that calls it see whole parameters, once "
            f'the model is sharded: polyshard.register_forward_method(model, "{method or "generate"}").'
        )

    # A module that is copied or pickled by itself holds pieces as before, and may not drag the model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        return partial, (_pass,)


def _method_of(owner: nn.Module) -> str:
    """The name of the outermost method of ``owner`` that is running; empty where none is.

    Nothing around one that computes gradients, and that one only if it calls no other: a loop over steps cannot be one
    forward, since its optimizer changes what stays gathered.
    """
    found = ""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # torch's own are how a module is called.
        theirs = code.co_argcount and package not in ("torch", "polyshard")
        if theirs and frame.f_locals.get(code.co_varnames[0]) is owner and _is_method(owner, code):
            differentiates = bool(_DIFFERENTIATES.intersection(code.co_names))
            if not (differentiates and found):
                found = code.co_name
            if differentiates:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _is_method(owner: nn.Module, code: CodeType) -> bool:
    """Whether ``code`` runs under its name as a method of ``owner``, and not as a function that is given it."""
    method: Any = inspect.getattr_static(owner, code.co_name, None)
    # Decorators that keep a name, such as torch.no_grad(), say what they are around.
    while method is not None:
        if getattr(method, "__code__", None) is code:
            return True
        method = getattr(method, "__func__", None) or getattr(method, "__wrapped__", None)
    return False


def _pass(*_: Any) -> None:
    """Lets every call through."""
