"""What variables of the environment say about settings."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..interfaces.references import ALLOWED_PLUGINS, DISABLE_PLUGINS
from .origin import Origin, Source, Sources, sources_in
from .plugin_spec import GROUP_OF_SETTING
from .suggestions import did_you_mean, listed

#: Environment variables that start with this override settings.
ENVIRONMENT_PREFIX = "POLYSHARD_"

#: The variables with the prefix that are no settings: no file and no configuration can set them.
NO_SETTINGS = frozenset({ALLOWED_PLUGINS, DISABLE_PLUGINS})

_PLUGIN_FIELDS: tuple[str, ...] = tuple(GROUP_OF_SETTING)
_TEXT_FIELDS: tuple[str, ...] = ("strategy", "device")
_OPTIONAL_FIELDS: tuple[str, ...] = ("device", "shard_size", "reshard_after_forward", "memory_budget")


@dataclass(frozen=True, slots=True)
class _Option:
    """A variable that sets one option of a plugin."""

    variable: str
    field: str
    name: str
    text: str


def variables(environ: Mapping[str, str]) -> str:
    """The names of those that say something, for messages."""
    return listed(name for name, text in environ.items() if _sets(name, text))


def overridden(
    settings: Mapping[str, Any], sources: Sources, environ: Mapping[str, str], defaults: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Sources]:
    """``settings`` and ``sources`` with what ``environ`` sets; these themselves where that is nothing.

    ``defaults``: of all settings that there are. Raises ``ConfigError`` for a variable that sets none of them.
    """
    fields, options = _read(environ, defaults)
    if not fields and not options:
        return settings, sources
    result, found = dict(settings), dict(sources)
    for field, (variable, text) in fields.items():
        value, former = _field_value(field, text), result.get(field)
        source = Source(Origin.ENVIRONMENT, variable)
        # The same plugin named again keeps the options that the file gave it.
        if isinstance(value, str) and isinstance(former, Mapping) and former.get("name") == value:
            found[field, None] = source
            continue
        result[field] = value
        found = {key: each for key, each in found.items() if key[0] != field} | sources_in({field: value}, source)
    for option in options:
        choice = result.get(option.field, defaults[option.field])
        if isinstance(choice, str):
            choice = {"name": choice}
        if not isinstance(choice, Mapping):
            raise ConfigError(
                f"environment variable {option.variable} cannot set an option of {option.field}, which is an object of "
                f"class {type(choice).__name__}. Name the plugin with {ENVIRONMENT_PREFIX}{option.field.upper()} as "
                "well."
            )
        result[option.field] = {**choice, option.name: _toml_value(option.text)}
        # An option makes a table of the setting, but does not choose the plugin.
        found.setdefault((option.field, None), Source(Origin.DEFAULT))
        found[option.field, option.name] = Source(Origin.ENVIRONMENT, option.variable)
    return result, found


def _read(environ: Mapping[str, str], defaults: Mapping[str, Any]) -> tuple[dict[str, tuple[str, str]], list[_Option]]:
    """The variable and text of each setting, and the options."""
    fields: dict[str, tuple[str, str]] = {}
    options: list[_Option] = []
    for variable, text in environ.items():
        if not _sets(variable, text):
            continue
        field, separator, option = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if field not in defaults:
            names = [name.upper() for name in defaults]
            raise ConfigError(
                f"environment variable {variable} is no setting."
                f"{did_you_mean(field, names, prefix=ENVIRONMENT_PREFIX)} There are: "
                f"{listed(ENVIRONMENT_PREFIX + name for name in names)}; options of a plugin are written as "
                f"{ENVIRONMENT_PREFIX}COLLECTIVES__WORLD_SIZE."
            )
        if not separator:
            fields[field] = (variable, text)
        elif field not in _PLUGIN_FIELDS or option in ("", "name"):
            raise ConfigError(
                f"environment variable {variable} sets no option of a plugin. Write "
                f"{ENVIRONMENT_PREFIX}{field.upper()} for the setting itself; options exist for "
                f"{listed(_PLUGIN_FIELDS)}."
            )
        else:
            options.append(_Option(variable, field, option, text))
    return fields, options


def _sets(variable: str, text: str) -> bool:
    """Whether the variable is meant for a setting, and says something."""
    return variable.startswith(ENVIRONMENT_PREFIX) and variable not in NO_SETTINGS and bool(text.strip())


def _field_value(field: str, text: str) -> Any:
    text = text.strip()
    if field in _OPTIONAL_FIELDS and text.casefold() == "none":
        return None
    if field in _PLUGIN_FIELDS:
        return _toml_value(text) if text.startswith(("{", '"', "'")) else text
    if field == "listeners":
        return _toml_value(text) if text.startswith("[") else [name for name in text.split(",") if name.strip()]
    if field in _TEXT_FIELDS:
        return text
    # Shells and launchers write True and False as often as TOML's true and false.
    return _toml_value(text.lower() if text.lower() in ("true", "false") else text)


def _toml_value(text: str) -> Any:
    """``text`` as a TOML value, or itself where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break could smuggle further keys in: such a text is not one value.
    return parsed["value"] if len(parsed) == 1 else text
