"""Where each setting came from."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Origin(enum.Enum):
    """Who decided on a value."""

    DEFAULT = "default"
    """Nobody: it is the default."""
    FILE = "file"
    """A table of a file."""
    ENVIRONMENT = "environment"
    """A variable of the environment, which wins over a file."""
    CODE = "code"
    """The program."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one value came from."""

    origin: Origin
    where: str = ""
    """``"[shard] of run.toml"``, or the variable's name; empty where nothing more is known."""

    def __str__(self) -> str:
        return self.where or self.origin.value


#: Of a setting (its name, None), and of an option of the plugin that it names (its name, the option's).
Sources = Mapping[tuple[str, str | None], Source]


def sources_in(settings: Mapping[str, Any], source: Source) -> dict[tuple[str, str | None], Source]:
    """``source`` for everything in a table of ``settings``."""
    found: dict[tuple[str, str | None], Source] = {}
    for name, value in settings.items():
        found[name, None] = source
        if isinstance(value, Mapping):
            found.update({(name, option): source for option in value if option != "name"})
    return found
