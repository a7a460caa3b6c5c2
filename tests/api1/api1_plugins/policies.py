from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn


class KeepLast(WrapPolicy):
    api_version = 1

    def __init__(self, context: PluginContext, attribute: str = "layers") -> None:
        self._attribute = attribute

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        layers = [layer for layer in getattr(root, self._attribute, ()) if layer not in context.ignored_modules]
        plan = {layer: {} for layer in layers}
        if layers:
            plan[layers[-1]] = {"reshard_after_forward": False}
        return plan
