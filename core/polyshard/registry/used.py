"""The plugins that a sharded model was given, to be asked about."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..interfaces import Group
from .construct import Constructed


@dataclass(frozen=True)
class UsedPlugin:
    """A plugin that serves a sharded model."""

    module: str
    """Fully-qualified name of the module that it serves, with all inside but what has plugins of its own; empty for the
    model itself."""
    group: Group
    name: str
    """As the configuration asked for it; of an object that the user gave, its class's."""
    distribution: str
    """The distribution that offers it; empty for an object that the user gave."""
    version: str
    """Version of the distribution; empty for an object that the user gave."""
    value: str
    """Where its factory is: ``"module:attribute"``."""
    file: str
    """The file in which its factory is defined; empty where none is known."""
    options: Mapping[str, Any]
    instance: object
    """What the factory returned."""
    inner: tuple[UsedPlugin, ...] = ()
    """The plugins that its factory constructed by name."""

    def __str__(self) -> str:
        origin = f"{self.distribution} {self.version}" if self.distribution else "an object of the program"
        inside = ", ".join(map(str, self.inner))
        return f"{self.name} ({origin}{'; of ' if inside else ''}{inside})"


def used(constructed: Constructed[Any], module: str = "") -> UsedPlugin:
    """``constructed`` as users see it. ``module``: what it serves."""
    resolved = constructed.resolved
    return UsedPlugin(
        module=module,
        group=resolved.group,
        name=resolved.name,
        distribution=resolved.distribution,
        version=resolved.version,
        value=resolved.value,
        file=_file(resolved.factory if resolved.distribution else type(constructed.instance)),
        options=dict(resolved.options),
        instance=constructed.instance,
        inner=tuple(used(each, module) for each in constructed.inner),
    )


def _file(defined: Any) -> str:
    module = inspect.getmodule(defined) or inspect.getmodule(type(defined))
    return getattr(module, "__file__", None) or ""
