"""Calls of modules that would compute with pieces: what ``generate`` and the like do outside of any forward.

Between steps the outermost module's own parameters are 1-D pieces. A method beside ``forward`` that calls the modules
that hold them would fail inside of torch ("'weight' must be 2-D") or, with a bias alone, compute something else. Each
of these modules refuses to be called then. While a forward runs they have no hook, which every call would pay for.
Modules inside of other units are left out: there are many, and what calls them is nearly always the unit's forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ...errors import UnshardedUseError
from .. import _torch_private
from .stage import Stage
from .step import Step

#: Under which the hooks stand; torch's own keys are numbers.
_KEY = "polyshard"


class Resting:
    """Lets the modules that hold the outermost stage's parameters refuse calls between steps."""

    def __init__(self, step: Step, stages: Sequence[Stage]) -> None:
        outermost = stages[0]
        # These gather when they are called.
        gathering = {stage.module for stage in stages}
        names = {module: name for name, module in outermost.module.named_modules()}
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
                refusals.setdefault(module, _Refusal(step, outermost.module, names[module], key, original))
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


class _Refusal:
    """The hook of one module."""

    def __init__(self, step: Step, owner: nn.Module, name: str, key: str, original: nn.Parameter) -> None:
        self._step = step
        self._owner = owner
        self._name = name
        self._key = key
        self._original = original

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        step = self._step
        # A checkpoint around the whole model computes with views inside of a backward.
        if step.unsharded or module._parameters.get(self._key) is not self._original:
            return
        method = _method_of(self._owner)
        called = f"by {type(self._owner).__name__}.{method} " if method else ""
        raise UnshardedUseError(
            f"'{self._name}' ({type(module).__name__}) was called {called}outside of the model's forward, while its "
            f"{self._key} is sharded (rank {step.rank}). Let the method that calls it see whole parameters, once the "
            f'model is sharded: polyshard.register_forward_method(model, "{method or "generate"}").'
        )

    # A module that is copied or pickled by itself holds pieces as before, and may not drag the model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_refusal, ()


def _method_of(owner: nn.Module) -> str:
    """The name of the outermost method of ``owner`` that is running; empty where none is."""
    found = ""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # torch's own are how a module is called.
        theirs = code.co_argcount and package not in ("torch", "polyshard")
        if theirs and frame.f_locals.get(code.co_varnames[0]) is owner:
            found = code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _no_refusal() -> Callable[..., None]:
    return _pass


def _pass(*_: Any) -> None:
    """Lets every call through."""
