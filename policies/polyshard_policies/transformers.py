"""``transformers``: units by what a model of Hugging Face's Transformers says of itself."""

from __future__ import annotations

from typing import ClassVar

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .traversal import candidates

_ATTRIBUTE = "_no_split_modules"


class NoSplitModules(WrapPolicy):
    """``transformers``: every module whose class the model names in ``_no_split_modules`` becomes a unit.

    These are its blocks, which Transformers, too, never divides between devices. The names are collected over all
    modules that have some: a model inside of an adapter's wrapper, or a vision tower in a language model, brings its
    own. Transformers is not imported.
    """

    api_version: ClassVar[int] = 1

    def __init__(self, context: PluginContext) -> None:
        """No options."""
        self._name = context.name

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where no module names any class, or ``root`` has no module of those named."""
        named = _named_classes(root)
        if not named:
            raise ConfigError(
                f"policy {self._name!r} asks a model for its {_ATTRIBUTE}, but no module in this {type(root).__name__} "
                "names any. Name the classes of its blocks: policy={'name': 'transformer', 'layers': [...]}."
            )
        if not any(type(module).__name__ in named for module in root.modules()):
            raise ConfigError(
                f"{type(root).__name__} has no module of the classes in its {_ATTRIBUTE}, {', '.join(sorted(named))}, "
                f"which policy {self._name!r} looks for. Name the classes of its blocks: "
                "policy={'name': 'transformer', 'layers': [...]}."
            )
        return {module: {} for _, module in candidates(root, context) if type(module).__name__ in named}


def _named_classes(root: nn.Module) -> frozenset[str]:
    # An adapter's wrapper answers for the model inside it, which comes up by itself.
    return frozenset(name for module in root.modules() for name in getattr(module, _ATTRIBUTE, None) or ())
