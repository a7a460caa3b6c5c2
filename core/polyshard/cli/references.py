"""``package.module:name`` in a command's arguments: functions of the user's."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ..config import did_you_mean
from ..errors import ConfigError


def function_at(reference: str, option: str) -> Callable[..., Any]:
    """What ``"package.module:name"`` names: a function or a class. ``option`` is where it was written.

    To be called inside of ``models.importing_beside``.

    Raises:
        ConfigError: it cannot be imported, there is no such name, or it cannot be called.
    """
    module_name, _, path = reference.partition(":")
    if not (module_name and path):
        raise ConfigError(f"{option} {reference!r} names no function. Write it as package.module:name.")
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    # Whatever a module does when it is imported must not end the command without a word.
    except BaseException as error:
        raise ConfigError(
            f"{option} {reference!r}: importing {module_name} raised {type(error).__name__}: {error}. It is looked for "
            f"in {os.getcwd()}, beside the configuration file, and among what is installed."
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError(
                f"{option} {reference!r}: {module_name} has no {path}.{did_you_mean(name, _callables(found))}"
            )
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{option} {reference!r} is of class {type(found).__name__}, which cannot be called.")
    function: Callable[..., Any] = found
    return function


def _callables(place: object) -> list[str]:
    return [name for name in dir(place) if callable(getattr(place, name, None))]
