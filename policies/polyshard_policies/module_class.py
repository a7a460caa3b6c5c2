"""``module_class`` and ``transformer``: units by the class of their module."""

from __future__ import annotations

from collections.abc import Iterable

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .references import resolve_classes
from .traversal import candidates, separable


class ModuleClass(WrapPolicy):
    """``module_class``: every instance of the given classes, or of their subclasses, becomes a unit."""

    def __init__(
        self, context: PluginContext, classes: type | str | Iterable[type | str], split_root: bool = False
    ) -> None:
        """``classes``: one or several, each a class or ``"package.module:Name"``.

        ``split_root``: what is left beside them becomes units as well, one for each outermost module that shares no
        parameter (an embedding, a head). The first gather and the last reduction of a step, which nothing hides, are
        then small, and the head is released like any unit. Such a module's parameters are for its own forward alone.

        Raises ``ConfigError`` for what is not a class or cannot be imported, for no class at all, and for a
        ``split_root`` that is not a bool.
        """
        self._classes = _some_classes(classes, f"classes of policy {context.name!r}")
        if not isinstance(split_root, bool):
            raise ConfigError(f"split_root of policy {context.name!r} is {split_root!r}. Give true or false.")
        self._split_root = split_root

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        chosen = [module for _, module in candidates(root, context) if isinstance(module, self._classes)]
        if self._split_root:
            chosen += separable(root, chosen, context)
        return {module: {} for module in chosen}


class Transformer(ModuleClass):
    """``transformer``: every transformer layer becomes a unit; the rest stays in the root, unless that is split."""

    def __init__(
        self, context: PluginContext, layers: type | str | Iterable[type | str], split_root: bool = False
    ) -> None:
        """``layers``: the classes of the model's blocks, each a class or ``"package.module:Name"``.

        ``split_root`` and errors: as in ``ModuleClass``.
        """
        super().__init__(context, _some_classes(layers, f"layers of policy {context.name!r}"), split_root)


def _some_classes(value: type | str | Iterable[type | str], where: str) -> tuple[type, ...]:
    classes = resolve_classes(value, where)
    if not classes:
        raise ConfigError(f"no class is given in {where}. Name at least one, or take the policy 'never'.")
    return classes
