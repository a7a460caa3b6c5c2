"""Values of options as text: ``"package.module:Name"`` for a class or a function, ``"4 GiB"`` for a size.

A reference imports a module, which runs code. Where one of the variables that restrict plugins is set, options may only
name what the program has imported itself.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ConfigError

#: Which installed plugins may be imported: ``Permission`` in ``registry/find.py``.
ALLOWED_PLUGINS, DISABLE_PLUGINS = "POLYSHARD_ALLOWED_PLUGINS", "POLYSHARD_DISABLE_PLUGINS"
#: Values that leave ``DISABLE_PLUGINS`` off.
SWITCHED_OFF = frozenset({"0", "false", "no", "off", ""})


def resolve_class(value: type | str, where: str) -> type:
    """The class that ``value`` is or names.

    ``where`` names the setting in messages. Raises ``ConfigError`` for what is not a class or cannot be imported.
    """
    found = resolve_object(value, where) if isinstance(value, str) else value
    if not isinstance(found, type):
        raise ConfigError(
            f"{value!r} is a {type(found).__name__} and not a class, in {where}. "
            "Give a module class or 'package.module:Name'."
        )
    return found


def resolve_classes(value: type | str | Iterable[type | str], where: str) -> tuple[type, ...]:
    """The classes that ``value``, one or several, is or names; raises as ``resolve_class`` does."""
    if isinstance(value, type | str) or not isinstance(value, Iterable):
        return (resolve_class(value, where),)
    return tuple(resolve_class(item, where) for item in value)


def resolve_callable(value: Callable[..., Any] | str, where: str) -> Callable[..., Any]:
    """The function that ``value`` is or names. Raises ``ConfigError`` for what cannot be called or imported."""
    found = resolve_object(value, where) if isinstance(value, str) else value
    if not callable(found):
        raise ConfigError(
            f"{value!r} is a {type(found).__name__} and cannot be called, in {where}. "
            "Give a function or 'package.module:name'."
        )
    return found


def resolve_object(reference: str, where: str) -> Any:
    """The object that ``reference`` names; a dotted name after the colon goes into classes.

    Raises ``ConfigError`` where there is no colon, no such module, or no such name in it, and for a module that is not
    imported yet where ``POLYSHARD_ALLOWED_PLUGINS`` or ``POLYSHARD_DISABLE_PLUGINS`` is set; a failure to import is
    chained.
    """
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"{reference!r} does not name an object, in {where}. Write it as 'package.module:Name'.")
    if module_name not in sys.modules:
        _refuse_import(module_name, reference, where)
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"cannot import {module_name!r} for {reference!r}, in {where}: {error}. Install it, or correct the name."
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Look for it in {module_name!r}."
            raise ConfigError(f"{module_name!r} has no {path!r}, asked for in {where}. {hint}")
        found = getattr(found, name)
    return found


def _refuse_import(module_name: str, reference: str, where: str) -> None:
    variable = next((each for each in (DISABLE_PLUGINS, ALLOWED_PLUGINS) if _restricts(each)), None)
    if variable is not None:
        raise ConfigError(
            f"{reference!r}, in {where}, names a module that the program has not imported, and {variable} is set: "
            f"options import nothing then. Import {module_name!r} in the program where it is trusted."
        )


def _restricts(variable: str) -> bool:
    text = os.environ.get(variable)
    return text is not None and (variable == ALLOWED_PLUGINS or text.strip().lower() not in SWITCHED_OFF)


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?(b?)", re.IGNORECASE)


def bytes_of(value: object) -> int | None:
    """``value``, or the bytes that it spells out: ``"4 GiB"`` is 4 x 1024**3, ``"4 GB"`` 4 x 1000**3, ``"512 B"`` 512.

    None for what is neither an int nor such text. An int may be negative: callers say what they take.
    """
    if isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())) and (match[4] or not match[2]):
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " kmgt".index((match[2] or " ").lower()))
    return value if isinstance(value, int) and not isinstance(value, bool) else None
