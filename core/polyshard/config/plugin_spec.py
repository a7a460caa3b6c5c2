"""Plugins as users name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, overload

from ..errors import ConfigError
from ..interfaces import Group

#: Names a plugin: ``"nccl"``, ``"acme-oneccl:nccl"`` (distribution and name), a table of ``name`` and the plugin's
#: options, or an object that is the plugin.
PluginChoice = str | Mapping[str, Any] | object

#: The group of the plugin that each of these settings names; ``listeners`` names several of ``Group.PLUGINS``.
GROUP_OF_SETTING: Mapping[str, Group] = {
    "collectives": Group.COLLECTIVES,
    "precision": Group.PRECISION,
    "offload": Group.OFFLOAD,
    "policy": Group.POLICIES,
}


@dataclass(frozen=True)
class PluginSpec:
    """A plugin named by the user, before anything was looked up."""

    name: str
    """Entry-point name."""
    distribution: str | None = None
    """The installed package whose plugin is meant; None where the name alone decides."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the plugin's factory."""

    @property
    def label(self) -> str:
        """The name as a user would write it: ``"name"`` or ``"distribution:name"``."""
        return f"{self.distribution}:{self.name}" if self.distribution else self.name

    @overload
    @classmethod
    def parse(cls, choice: str | Mapping[str, Any] | PluginSpec) -> PluginSpec: ...
    @overload
    @classmethod
    def parse(cls, choice: object) -> object: ...
    @classmethod
    def parse(cls, choice: object) -> object:
        """Read a ``PluginChoice``.

        A string or a table becomes a ``PluginSpec``; any other object is the plugin itself and is returned unchanged.
        Raises ``ConfigError`` for an empty name and for a table without ``name``.
        """
        if isinstance(choice, str):
            distribution, colon, name = choice.rpartition(":")
            if not name.strip() or (colon and not distribution.strip()):
                raise ConfigError(f'{choice!r} does not name a plugin. Write "name" or "distribution:name".')
            return cls(name.strip(), distribution.strip() or None)
        if isinstance(choice, Mapping):
            table = dict(choice)
            name = table.pop("name", None)
            if not isinstance(name, str):
                keys = ", ".join(repr(key) for key in choice) or "nothing"
                raise ConfigError(
                    f"a plugin table needs a string under 'name', but this one holds {keys}. Write "
                    '{"name": "...", "option": value}.'
                )
            if not all(isinstance(key, str) for key in table):
                raise ConfigError(f"options of plugin {name!r} must be named by strings, but are {list(table)!r}.")
            return dataclasses.replace(cls.parse(name), options=table)
        return choice


def check_choice(field: str, choice: object) -> None:
    """Raise ``ConfigError`` where ``choice``, given for the setting ``field``, cannot stand for a plugin."""
    if choice is None or isinstance(choice, bool | int | float | bytes | list | tuple | set | frozenset):
        remedy = ""
        if field == "policy" and isinstance(choice, list | tuple | set | frozenset) and choice:
            remedy = ' Write {"name": "module_class", "classes": [...]} for classes of modules.'
        raise ConfigError(
            f"{field} must be a plugin's name, a table with a name, or a plugin object, not {choice!r}.{remedy}"
        )
    try:
        PluginSpec.parse(choice)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
