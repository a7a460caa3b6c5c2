"""``always`` and ``never``."""

from __future__ import annotations

from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .traversal import UNCALLED, candidates, counted_parameters


class Always(WrapPolicy):
    """``always``: every submodule with parameters of its own or below becomes a unit.

    ``ModuleList``, ``ModuleDict``, ``ParameterList`` and ``ParameterDict`` are passed over: nothing calls them, so they
    could not gather in time.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        counted = counted_parameters(root, context)
        return {
            module: {}
            for _, module in candidates(root, context)
            if not isinstance(module, UNCALLED) and any(parameter in counted for parameter in module.parameters())
        }

    def reason(self, module: nn.Module, name: str) -> str:
        own = any(True for _ in module.parameters(recurse=False))
        return "it has parameters of its own" if own else "there are parameters in it"


class Never(WrapPolicy):
    """``never``: the root is the only unit."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return {}
