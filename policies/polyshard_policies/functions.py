"""``lambda`` and ``custom``: units by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from polyshard.errors import PluginContractError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy, resolve_callable
from torch import nn

from .function_names import described
from .recursive import RecursivePolicy, takes_recurse
from .traversal import candidates


class Lambda(WrapPolicy):
    """``lambda``: every submodule for which a function answers True becomes a unit."""

    api_version = 1

    def __init__(self, context: PluginContext, fn: Callable[..., bool] | str) -> None:
        """``fn``: a function or ``"package.module:name"``, called with one module, or with the keywords of
        ``RecursiveFunction`` where it takes them.

        Raises ``ConfigError`` for what cannot be called or imported.
        """
        self._fn = resolve_callable(fn, f"fn of policy {context.name!r}")
        self._recursive = RecursivePolicy(self._fn) if takes_recurse(self._fn) else None

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``PluginContractError`` where a function of one module answers neither True nor False."""
        if self._recursive is not None:
            return self._recursive.plan(root, context)
        chosen: UnitPlan = {module: {} for name, module in candidates(root, context) if self._answer(name, module)}
        return _not_nothing(chosen, root, "lambda", self._fn, context)

    def reason(self, module: nn.Module, name: str) -> str:
        if self._recursive is not None:
            return self._recursive.reason(module, name)
        return f"{described(self._fn)} answered True"

    def _answer(self, name: str, module: nn.Module) -> bool:
        answer = self._fn(module)
        if isinstance(answer, bool):
            return answer
        raise PluginContractError(
            f"the function of a lambda policy returned {answer!r} for module {name!r} ({type(module).__name__}). "
            "Return True for a unit of its own, or False."
        )


class Custom(WrapPolicy):
    """``custom``: the same, but the function may answer with a unit's own settings."""

    api_version = 1

    def __init__(self, context: PluginContext, fn: Callable[[nn.Module], bool | Mapping[str, Any]] | str) -> None:
        """``fn``: a function of one module, or ``"package.module:name"``; it returns True, False, or a dict of settings
        (``polyshard.interfaces.UNIT_OVERRIDES``), which makes a unit even when it is empty.

        Raises ``ConfigError`` for what cannot be called or imported.
        """
        self._fn = resolve_callable(fn, f"fn of policy {context.name!r}")
        # Weak: a policy may be kept and serve several models.
        self._chosen: WeakKeyDictionary[nn.Module, Mapping[str, Any]] = WeakKeyDictionary()

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``PluginContractError`` where the function returns anything else."""
        chosen: dict[nn.Module, Mapping[str, Any]] = {}
        for name, module in candidates(root, context):
            answer = self._fn(module)
            if isinstance(answer, Mapping):
                chosen[module] = answer
            elif not isinstance(answer, bool):
                raise PluginContractError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer!r} for module {name!r} ({type(module).__name__}). Return a bool, or a dict of settings "
                    "for that unit."
                )
            elif answer:
                chosen[module] = {}
        self._chosen.update(chosen)
        return _not_nothing(chosen, root, "custom", self._fn, context)

    def reason(self, module: nn.Module, name: str) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self._chosen[module].items())
        return f"{described(self._fn)} chose it" + (f" with {settings}" if settings else "")


#: Functions of which it was told that they chose nothing.
_told: WeakSet[Callable[..., Any]] = WeakSet()


def _not_nothing(
    chosen: UnitPlan, root: nn.Module, policy: str, fn: Callable[..., Any], context: PolicyContext
) -> UnitPlan:
    # A function may mean it; but a model in one unit is rarely what it was written for. Once, where a program gives
    # many modules the same one.
    if not chosen and any(root.children()) and not _is_told(fn):
        told = context.warn(
            f"the function of a {policy} policy chose no module inside this {type(root).__name__}, so that the whole "
            "model is one unit. Correct it, or take the policy 'never' if that is meant."
        )
        if told:
            # Not all that can be called can be remembered.
            with suppress(TypeError):
                _told.add(fn)
    return chosen


def _is_told(fn: Callable[..., Any]) -> bool:
    try:
        return fn in _told
    except TypeError:
        return False
