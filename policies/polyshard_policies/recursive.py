"""Functions of the form ``(module, recurse, nonwrapped_numel)``, asked on the way down and on the way up."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from polyshard.interfaces import PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .function_names import described
from .traversal import all_ignored, counted_parameters


class RecursiveFunction(Protocol):
    """Asked twice for each module, with all arguments by keyword."""

    def __call__(self, *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """With ``recurse=True``: whether to look at the children of ``module``. With ``recurse=False``: whether
        ``module`` becomes a unit.

        ``nonwrapped_numel``: elements of the parameters in ``module``, on the way up less those in units chosen inside
        it. A module whose children were not to be looked at is not asked about again and becomes no unit.
        """


def takes_recurse(function: Callable[..., Any]) -> bool:
    """Whether ``function`` can be called as a ``RecursiveFunction``."""
    try:
        inspect.signature(function).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


class RecursivePolicy(WrapPolicy):
    """Units by a ``RecursiveFunction``, from the leaves up."""

    api_version = 1

    def __init__(self, function: RecursiveFunction) -> None:
        self._function = function
        # Weak: a policy may be kept and serve several models.
        self._own: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        chosen = _Descent(self._function, root, context).chosen
        self._own.update(chosen)
        return {module: {} for module in root.modules() if module in chosen}

    def own_numel(self, module: nn.Module) -> int:
        """Elements of the parameters in ``module``, which ``plan`` chose, that are in no unit inside of it."""
        return self._own[module]

    def reason(self, module: nn.Module, name: str) -> str:
        return f"{described(self._function)} answered True for {self._own[module]:,} parameters of its own"


class _Descent:
    """One walk over one model. ``chosen``: elements of each chosen module's parameters that are in no unit inside."""

    def __init__(self, function: RecursiveFunction, root: nn.Module, context: PolicyContext) -> None:
        self.chosen: dict[nn.Module, int] = {}
        self._function = function
        self._counted = counted_parameters(root, context)
        self._ignored = all_ignored(context)
        self._seen: set[nn.Module] = {root}
        self._taken: set[nn.Parameter] = set()
        numel = sum(self._counted.values())
        if function(module=root, recurse=True, nonwrapped_numel=numel):
            self._visit_children(root)

    def _visit_children(self, module: nn.Module) -> None:
        for child in module.children():
            if child not in self._ignored and child not in self._seen:
                self._seen.add(child)
                self._visit(child)

    def _visit(self, module: nn.Module) -> None:
        inside = [parameter for parameter in module.parameters() if parameter in self._counted]
        if not self._function(module=module, recurse=True, nonwrapped_numel=self._numel(inside)):
            return
        self._visit_children(module)
        own = self._numel(inside)
        if self._function(module=module, recurse=False, nonwrapped_numel=own):
            self.chosen[module] = own
            self._taken.update(inside)

    def _numel(self, parameters: list[nn.Parameter]) -> int:
        return sum(self._counted[parameter] for parameter in parameters if parameter not in self._taken)
