"""Makes a unit of each entry of a list; the last one stays gathered until its backward, which comes next."""

from __future__ import annotations

from typing import Any

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn


class KeepLast(WrapPolicy):
    """Chooses the entries of every ``nn.ModuleList`` or ``nn.Sequential`` that its parent calls ``attribute``."""

    api_version = 1

    def __init__(self, context: PluginContext, attribute: str = "layers") -> None:
        if not attribute.isidentifier():
            raise ConfigError(f"attribute of policy {context.name!r} is {attribute!r}; give the name of an attribute")
        self._attribute = attribute

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        ignored = {inside for module in context.ignored_modules for inside in module.modules()}
        plan: dict[nn.Module, dict[str, Any]] = {}
        for parent in root.modules():
            entries = getattr(parent, self._attribute, None)
            if isinstance(entries, (nn.ModuleList, nn.Sequential)):
                chosen = [entry for entry in entries if entry not in ignored]
                plan.update({entry: {} for entry in chosen})
                if chosen:
                    plan[chosen[-1]] = {"reshard_after_forward": False}
        return plan

    def reason(self, module: nn.Module, name: str) -> str:
        return f"an entry of {self._attribute!r}"
