"""``module_class`` and ``transformer``: units by the class of their module."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy, resolve_classes
from torch import nn

from .traversal import candidates


class ModuleClass(WrapPolicy):
    """``module_class``: every instance of the given classes, or of their subclasses, becomes a unit.

    Classes of which the model has no module are an error: it would be one unit without a word. Where others have some,
    a class may have none, unless the model has another one of its name: two copies of a module's source.
    """

    api_version = 1

    def __init__(self, context: PluginContext, classes: type | str | Iterable[type | str]) -> None:
        """``classes``: one or several, each a class or ``"package.module:Name"``.

        Raises ``ConfigError`` for what is not a class or cannot be imported, and for no class at all.
        """
        self._option = "classes"
        self._where = f"classes of policy {context.name!r}"
        self._classes = _some_classes(classes, self._where)

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where ``root`` has no module of the classes, with the nearest that it has."""
        # The root is a unit in any case, and what is ignored is there. A model of one module has nothing to choose.
        present = dict.fromkeys(type(module) for module in root.modules())
        absent = [wanted for wanted in self._classes if not any(issubclass(each, wanted) for each in present)]
        named = {each.__name__ for each in present}
        wrong = [wanted for wanted in absent if len(absent) == len(self._classes) or wanted.__name__ in named]
        if wrong and any(root.children()):
            raise ConfigError(_absent(wrong[0], present, root, self._where))
        return {module: {} for _, module in candidates(root, context) if isinstance(module, self._classes)}

    def reason(self, module: nn.Module, name: str) -> str:
        own = type(module)
        if own in self._classes:
            return f"class {own.__name__} is in {self._option}"
        base = next(each for each in self._classes if isinstance(module, each))
        return f"class {own.__name__} derives from {base.__name__}, which is in {self._option}"


class Transformer(ModuleClass):
    """``transformer``: every transformer layer becomes a unit; the rest stays in the root."""

    api_version = 1

    def __init__(self, context: PluginContext, layers: type | str | Iterable[type | str]) -> None:
        """``layers``: the classes of the model's blocks, each a class or ``"package.module:Name"``.

        Raises ``ConfigError`` for what is not a class or cannot be imported, and for no class at all.
        """
        where = f"layers of policy {context.name!r}"
        super().__init__(context, _some_classes(layers, where))
        self._option = "layers"
        self._where = where


def _absent(wanted: type, present: Iterable[type], root: nn.Module, where: str) -> str:
    own = {each.__name__: each for each in present if not each.__module__.startswith("torch.")}
    known = own or {each.__name__: each for each in present}
    near = difflib.get_close_matches(wanted.__name__, known, n=1)
    if near and near[0] == wanted.__name__:
        hint = f"Its {near[0]} is another class, {_reference(known[near[0]])}: name that."
    elif near:
        hint = f"Did you mean {_reference(known[near[0]])}? It has: {', '.join(sorted(known))}."
    else:
        hint = f"Name a class that it has: {', '.join(sorted(known))}."
    return f"{type(root).__name__} has no module of the class {_reference(wanted)}, in {where}. {hint}"


def _reference(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _some_classes(value: type | str | Iterable[type | str], where: str) -> tuple[type, ...]:
    classes = resolve_classes(value, where)
    if not classes:
        raise ConfigError(f"no class is given in {where}. Name at least one, or take the policy 'never'.")
    return classes
