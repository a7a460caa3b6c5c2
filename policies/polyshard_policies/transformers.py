"""``transformers``: units by what a model of Hugging Face's Transformers says of itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy
from torch import nn

from .traversal import candidates

_ATTRIBUTE = "_no_split_modules"
_INSTEAD = "Name the classes of its blocks: policy={'name': 'transformer', 'layers': [...]}."


class NoSplitModules(WrapPolicy):
    """``transformers``: every module whose class the model names in ``_no_split_modules`` becomes a unit.

    These are its blocks, which Transformers, too, never divides between devices. The names are collected over all
    modules that have some: a model inside of an adapter's wrapper, or a vision tower in a language model, brings its
    own. Transformers is not imported.
    """

    api_version: ClassVar[int] = 1

    def __init__(self, context: PluginContext, leave_out: str | Iterable[str] = ()) -> None:
        """``leave_out``: names of such classes that stay in the unit around them, since some ranks run them in a step
        and others do not: the layers of a vision tower, where a rank's batch may have no image.

        Raises ``ConfigError`` where these are no names.
        """
        names = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
        self._where = f"policy {context.name!r}"
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"leave_out of {self._where} takes names of classes, not {leave_out!r}.")
        self._left_out = frozenset(names)

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where no module names any class, ``root`` has none of those named, or ``leave_out``
        names another one."""
        if not any(root.children()):
            # One module has nothing to choose from.
            return {}
        named = _named_classes(root)
        if not named:
            raise ConfigError(
                f"{self._where} asks a model for its {_ATTRIBUTE}, but no module in this {type(root).__name__} names "
                f"any. {_INSTEAD}"
            )
        present = named & {type(module).__name__ for module in root.modules()}
        if not present:
            raise ConfigError(
                f"{type(root).__name__} has no module of the classes in its {_ATTRIBUTE}, {_listed(named)}, which "
                f"{self._where} looks for. {_INSTEAD}"
            )
        for unknown in sorted(self._left_out - named):
            near = difflib.get_close_matches(unknown, named, n=1)
            raise ConfigError(
                f"leave_out of {self._where} names {unknown!r}, which {type(root).__name__} has not in its "
                f"{_ATTRIBUTE}. " + (f"Did you mean {near[0]!r}?" if near else f"It has: {_listed(named)}.")
            )
        wanted = present - self._left_out
        return {module: {} for _, module in candidates(root, context) if type(module).__name__ in wanted}

    def reason(self, module: nn.Module, name: str) -> str:
        return f"class {type(module).__name__} is in the model's {_ATTRIBUTE}"


def _named_classes(root: nn.Module) -> frozenset[str]:
    # An adapter's wrapper answers for the model inside it, which comes up by itself.
    return frozenset(name for module in root.modules() for name in getattr(module, _ATTRIBUTE, None) or ())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
