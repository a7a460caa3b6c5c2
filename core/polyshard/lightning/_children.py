"""A policy that makes a unit of each module that a training step may call by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import registry
from ..config import PluginChoice, PluginSpec
from ..interfaces import Group, PluginContext, PolicyContext, UnitPlan, WrapPolicy

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def with_children(choice: PluginChoice) -> PluginChoice:
    """The policy ``choice``, and beside what it chooses the children of the outermost module."""
    if not isinstance(choice, (str, Mapping, WrapPolicy)) and callable(choice):
        choice = {"name": "custom", "fn": choice}
    return Children(choice)


@dataclass(frozen=True)
class Children(WrapPolicy):
    """Units are the outermost module's children, and what ``inner`` chooses."""

    api_version = 1
    inner: PluginChoice
    """A policy as ``ShardConfig.policy`` takes it."""

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """The modules that become units."""
        spec = PluginSpec.parse(self.inner)
        name = spec.name if isinstance(spec, PluginSpec) else ""
        made = PluginContext(name, context.device)
        policy = registry.construct(registry.resolve(Group.POLICIES, self.inner), made).instance
        children: dict[nn.Module, dict[str, Any]] = {child: {} for child in _called(root)}
        return {**children, **policy.plan(root, context)}


def _called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _NEVER_CALLED):
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child
