"""What a save or a load is called with: values of the right kind, which ranks compare."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigTypeError
from ..state.kind import described
from ..state.optimizers import Joint, Optimizers


def path_of(given: object, name: str) -> Path:
    """The argument ``name`` as a path.

    Raises:
        ConfigTypeError: it is none.
        ConfigError: it is empty, or has a character that no path has.
    """
    if isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str):
        if os.fspath(given) == "":
            raise ConfigError(f"{name} is empty, and must name a folder. The current one is '.'.")
        if "\0" in os.fspath(given):
            raise ConfigError(f"{name} is {given!r}: no path has a null character.")
        return Path(given)
    none = " latest() returns None where a folder holds no checkpoint." if given is None else ""
    raise ConfigTypeError(f"{name} is {given!r}, and must be a path.{none}")


def number_of(given: object, name: str, least: int) -> int:
    """The argument ``name`` as an int.

    Raises:
        ConfigTypeError: it is no whole number.
        ConfigError: it is less than ``least``.
    """
    try:
        if isinstance(given, bool):
            raise TypeError
        number = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigTypeError(f"{name} is {given!r}, and must be an int.") from None
    if number < least:
        raise ConfigError(f"{name} is {number}, and must be {least} or more.")
    return number


def mapping_of(given: object, name: str) -> Mapping[str, Any]:
    """The argument ``name`` as a mapping; an empty one for None.

    Raises:
        ConfigTypeError: it is none.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return given
    raise ConfigTypeError(
        f"{name} is {type(given).__name__}, and a checkpoint names what it holds. Give a mapping, such as "
        '{"position": 100}.'
    )


def joint_of(optimizer: Optimizers | None) -> Joint | None:
    """The argument ``optimizer`` as one.

    Raises:
        ConfigTypeError: there is something else among them.
    """
    return None if optimizer is None else Joint(optimizer)


def told(joint: Joint | None) -> str:
    """What ranks compare of optimizers: their classes, and how many groups each has."""
    if joint is None:
        return "None"
    kinds = described(joint)
    kinds = [kinds] if isinstance(kinds, Mapping) else kinds
    groups = [own.stop - own.start for _, own in joint.parts()]
    return ", ".join(f"{kind['class']} of {number} group(s)" for kind, number in zip(kinds, groups, strict=True))


def settings_told(joint: Joint | None) -> dict[str, object]:
    """What ranks compare of the settings of each group: a learning rate, say, that drifted apart on a rank's own loss.

    Each rank steps its own pieces by its own settings, so that where they differ the model is a mixture. Of others than
    numbers, words, None and tuples of these nothing is said.
    """
    if joint is None:
        return {}
    return {
        f"{name} of the optimizer's group {index}": value
        for index, group in enumerate(joint.groups)
        # Two ranks' may stand in different orders.
        for name, value in sorted(group.items())
        if _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
