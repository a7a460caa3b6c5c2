"""Groups of plugins as they are written on a command line."""

from __future__ import annotations

from ..config import did_you_mean
from ..errors import ConfigError
from ..interfaces import Group


def group_named(name: str) -> Group:
    """The group that ``name`` stands for, with or without ``polyshard.``; raises ``ConfigError`` for any other name."""
    short = {group.value.rpartition(".")[2]: group for group in Group}
    key = name.removeprefix("polyshard.")
    if key not in short:
        raise ConfigError(f"no plugin group is named {name!r}.{did_you_mean(key, short)} Groups: {', '.join(short)}.")
    return short[key]
