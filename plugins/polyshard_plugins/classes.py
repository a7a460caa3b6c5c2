"""Module classes as settings: objects in Python, ``"package.module:Name"`` in files."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable

from polyshard.errors import ConfigError

#: What a setting of one class takes.
ClassSetting = type | str


def resolve_classes(value: ClassSetting | Iterable[ClassSetting], where: str) -> tuple[type, ...]:
    """The classes that ``value`` (one, or several) means.

    ``where`` names the setting in messages. Raises ``ConfigError`` for what is not a class or cannot be imported.
    """
    if isinstance(value, type | str):
        return (resolve_class(value, where),)
    if not isinstance(value, Iterable):
        raise ConfigError(
            f"a {type(value).__name__} is not a class, in {where}. Give classes or 'package.module:Name'."
        )
    return tuple(resolve_class(item, where) for item in value)


def resolve_class(value: ClassSetting, where: str) -> type:
    """The class that ``value`` means; raises as ``resolve_classes`` does."""
    if isinstance(value, type):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{value!r} is not a class, in {where}. Give a class or 'package.module:Name'.")
    module_name, colon, path = value.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"{value!r} does not name a class, in {where}. Write it as 'package.module:Name'.")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module_name!r} for {value!r}, in {where}: {error}. Install it, or correct the name."
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Look for it in {module_name!r}."
            raise ConfigError(f"{module_name!r} has no {path!r}, asked for in {where}. {hint}")
        found = getattr(found, name)
    if not isinstance(found, type):
        raise ConfigError(f"{value!r} is a {type(found).__name__} and not a class, in {where}. Name a module class.")
    return found
