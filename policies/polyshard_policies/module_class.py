"""``module_class`` and ``transformer``: units by the class of their module."""

from __future__ import annotations

from collections.abc import Iterable

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .references import resolve_classes
from .traversal import candidates


class ModuleClass(WrapPolicy):
    """``module_class``: every instance of the given classes, or of their subclasses, becomes a unit."""

    api_version = 1

    def __init__(self, context: PluginContext, classes: type | str | Iterable[type | str]) -> None:
        """``classes``: one or several, each a class or ``"package.module:Name"``.

        Raises ``ConfigError`` for what is not a class or cannot be imported, and for no class at all.
        """
        self._classes = _some_classes(classes, f"classes of policy {context.name!r}")

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return {module: {} for _, module in candidates(root, context) if isinstance(module, self._classes)}


class Transformer(ModuleClass):
    """``transformer``: every transformer layer becomes a unit; the rest stays in the root."""

    def __init__(self, context: PluginContext, layers: type | str | Iterable[type | str]) -> None:
        """``layers``: the classes of the model's blocks, each a class or ``"package.module:Name"``.

        Raises ``ConfigError`` for what is not a class or cannot be imported, and for no class at all.
        """
        super().__init__(context, _some_classes(layers, f"layers of policy {context.name!r}"))


def _some_classes(value: type | str | Iterable[type | str], where: str) -> tuple[type, ...]:
    classes = resolve_classes(value, where)
    if not classes:
        raise ConfigError(f"no class is given in {where}. Name at least one, or take the policy 'never'.")
    return classes
