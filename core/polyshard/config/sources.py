"""Settings as users write them: plugins by name, TOML files, variables of the environment; and where each came from."""

from __future__ import annotations

import dataclasses
import enum
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from typing_extensions import override

from ..errors import ConfigError, did_you_mean, warn_once
from ..interfaces import Group
from ..interfaces.options import ALLOWED_PLUGINS, DISABLE_PLUGINS

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


#: Environment variables that start with this override settings.
ENVIRONMENT_PREFIX = "POLYSHARD_"

#: The variables with the prefix that are no settings: no file and no configuration can set them.
NO_SETTINGS = frozenset({ALLOWED_PLUGINS, DISABLE_PLUGINS})

_PLUGIN_FIELDS = tuple(GROUP_OF_SETTING)
_TEXT_FIELDS = ("strategy", "device")
_DIMENSION_FIELDS = ("shard", "replicate")
_OPTIONAL_FIELDS = ("device", "shard_size", "reshard_after_forward", "memory_budget", *_DIMENSION_FIELDS)


class Origin(enum.Enum):
    """The kind of source of a value."""

    DEFAULT = "default"
    """The default of the setting."""
    FILE = "file"
    """A table of a file."""
    ENVIRONMENT = "environment"
    """A variable of the environment, which wins over a file."""
    CODE = "code"
    """The program."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one value."""

    origin: Origin
    where: str = ""
    """``"[shard] of run.toml"``, or the variable's name; empty where nothing more is known."""

    @override
    def __str__(self) -> str:
        return self.where or self.origin.value


#: By (setting, None), and by (setting, option) for options of the plugin that a setting names.
Sources = Mapping[tuple[str, str | None], Source]


def sources_in(settings: Mapping[str, Any], source: Source) -> dict[tuple[str, str | None], Source]:
    """``source`` for everything in a table of ``settings``."""
    found: dict[tuple[str, str | None], Source] = {}
    for name, value in settings.items():
        found[name, None] = source
        if isinstance(value, Mapping):
            found.update({(name, option): source for option in value if option != "name"})
    return found


def read_table(file: Path, table: str, names: Collection[str]) -> dict[str, Any]:
    """The settings in ``[table]`` of ``file``; raises ``ConfigError`` where it cannot be read or has no such table.

    Warns of a key outside of all tables that is one of ``names``, those of settings.
    """
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    settings = document.get(table)
    if not isinstance(settings, dict):
        tables = [key for key, value in document.items() if isinstance(value, dict)]
        raise ConfigError(
            f"{file} has no table [{table}].{did_you_mean(table, tables)} Its tables: {', '.join(tables) or 'none'}. "
            f"Write [{table}] above the settings, or name the table that has them."
        )
    for key in document.keys() & names:
        if not isinstance(document[key], dict):
            # No error: it may be a setting of another program, whose tables stand in the same file.
            warn_once(f"{key!r} stands above [{table}] in {file}, and is not read. Write it below [{table}].")
    return settings


def variables(environ: Mapping[str, str]) -> str:
    """The names of the variables that set something, for messages."""
    return ", ".join(name for name, text in environ.items() if _sets(name, text))


def overridden(
    settings: Mapping[str, Any], sources: Sources, environ: Mapping[str, str], defaults: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Sources]:
    """``settings`` and ``sources``, overridden by ``environ``; the same objects where no variable sets anything.

    ``defaults``: of every setting. Raises ``ConfigError`` for a variable that sets none of them.
    """
    read = [_setting_of(variable, defaults) for variable, text in environ.items() if _sets(variable, text)]
    if not read:
        return settings, sources
    result, found = dict(settings), dict(sources)
    # Plugins before their options.
    for field, option, variable in sorted(read, key=lambda each: bool(each[1])):
        source, text = Source(Origin.ENVIRONMENT, variable), environ[variable]
        if not option:
            value, former = _field_value(field, text), result.get(field)
            # The same plugin named again keeps the options that the file gave it.
            if isinstance(value, str) and isinstance(former, Mapping) and former.get("name") == value:
                found[field, None] = source
                continue
            result[field] = value
            found = {key: each for key, each in found.items() if key[0] != field} | sources_in({field: value}, source)
            continue
        choice = result.get(field, defaults[field])
        if isinstance(choice, str):
            choice = {"name": choice}
        if not isinstance(choice, Mapping):
            raise ConfigError(
                f"environment variable {variable} cannot set an option of {field}, which is an object of class "
                f"{type(choice).__name__}. Name the plugin with {ENVIRONMENT_PREFIX}{field.upper()} as well."
            )
        result[field] = {**choice, option: _toml_value(text)}
        # An option makes a table of the setting, but does not choose the plugin.
        found.setdefault((field, None), Source(Origin.DEFAULT))
        found[field, option] = source
    return result, found


def _setting_of(variable: str, defaults: Mapping[str, Any]) -> tuple[str, str, str]:
    """The setting, the option of its plugin (empty for none), and ``variable``, which names both."""
    field, separator, option = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
    if field not in defaults:
        names = [name.upper() for name in defaults]
        raise ConfigError(
            f"environment variable {variable} is no setting."
            f"{did_you_mean(field, names, prefix=ENVIRONMENT_PREFIX)} There are: "
            f"{', '.join(ENVIRONMENT_PREFIX + name for name in names)}; options of a plugin are written as "
            f"{ENVIRONMENT_PREFIX}COLLECTIVES__WORLD_SIZE."
        )
    if separator and (field not in _PLUGIN_FIELDS or option in ("", "name")):
        raise ConfigError(
            f"environment variable {variable} sets no option of a plugin. Write "
            f"{ENVIRONMENT_PREFIX}{field.upper()} for the setting itself; options exist for "
            f"{', '.join(_PLUGIN_FIELDS)}."
        )
    return field, option, variable


def _sets(variable: str, text: str) -> bool:
    """Whether the variable overrides a setting: it has the prefix and a text."""
    return variable.startswith(ENVIRONMENT_PREFIX) and variable not in NO_SETTINGS and bool(text.strip())


def _field_value(field: str, text: str) -> Any:
    text = text.strip()
    if field in _OPTIONAL_FIELDS and text.casefold() == "none":
        return None
    if field in _PLUGIN_FIELDS:
        return _toml_value(text) if text.startswith(("{", '"', "'")) else text
    if field == "listeners" or field in _DIMENSION_FIELDS:
        return _toml_value(text) if text.startswith("[") else [name.strip() for name in text.split(",") if name.strip()]
    if field in _TEXT_FIELDS:
        return text
    # Shells and launchers write True and False as often as TOML's true and false.
    return _toml_value(text.lower() if text.lower() in ("true", "false") else text)


def _toml_value(text: str) -> Any:
    """``text`` as a TOML value, or itself where it is not TOML."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break could smuggle further keys in: such a text is not one value.
    return parsed["value"] if len(parsed) == 1 else text
