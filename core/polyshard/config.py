"""What a user decides about sharding: one frozen object, from Python, from a TOML file, or from the environment."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch

from .errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ENVIRONMENT_PREFIX", "PluginChoice", "PluginSpec", "ShardConfig", "Strategy", "did_you_mean"]

#: Environment variables that start with this override settings.
ENVIRONMENT_PREFIX = "POLYSHARD_"

#: Names a plugin: ``"nccl"``, ``"acme-oneccl:nccl"`` (distribution and name), a table of ``name`` and the plugin's
#: options, or an object that is the plugin.
PluginChoice = str | Mapping[str, Any] | object

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?(b?)", re.IGNORECASE)

_Stored = TypeVar("_Stored")
_Accepted = TypeVar("_Accepted")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``" Did you mean 'x'?"`` for the known word nearest to ``word``, letter case aside, or an empty string.

    ``prefix`` is put before the suggestion and takes no part in the comparison.
    """
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f" Did you mean {prefix + by_folded[near[0]]!r}?" if near else ""


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


class Strategy(enum.Enum):
    """What each rank keeps of parameters (P), gradients (G) and optimizer state (O)."""

    FULL_SHARD = "full_shard"
    """P, G and O are sharded over all ranks; parameters are released after forward and after backward (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """G and O are sharded over all ranks; parameters stay gathered from forward until the end of backward (ZeRO-2)."""
    NO_SHARD = "no_shard"
    """Every rank keeps P, G and O whole; gradients are all-reduced."""
    HYBRID_SHARD = "hybrid_shard"
    """``FULL_SHARD`` inside groups of ``shard_size`` ranks, replicated between the groups (HSDP)."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """``SHARD_GRAD_OP`` inside groups of ``shard_size`` ranks, replicated between the groups."""

    @property
    def hybrid(self) -> bool:
        """Whether shards are replicated between groups of ranks."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are released after forward where ``ShardConfig.reshard_after_forward`` is None."""
        return self in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)


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
                keys = _listed(repr(key) for key in choice) or "nothing"
                raise ConfigError(
                    f"a plugin table needs a string under 'name', but this one holds {keys}. Write "
                    '{"name": "...", "option": value}.'
                )
            if not all(isinstance(key, str) for key in table):
                raise ConfigError(f"options of plugin {name!r} must be named by strings, but are {list(table)!r}.")
            return dataclasses.replace(cls.parse(name), options=table)
        return choice


class _Normalised(Generic[_Stored, _Accepted]):
    """A dataclass field that takes several spellings of a value and always reads as one type."""

    def __init__(self, convert: Callable[[_Stored | _Accepted], _Stored], default: _Stored) -> None:
        self._convert = convert
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> _Stored:
        if instance is None:
            return self._default
        value: _Stored = instance.__dict__[self._name]
        return value

    def __set__(self, instance: object, value: _Stored | _Accepted) -> None:
        instance.__dict__[self._name] = self._convert(value)


def _strategy(value: Strategy | str) -> Strategy:
    if isinstance(value, Strategy):
        return value
    names = [strategy.value for strategy in Strategy]
    if isinstance(value, str) and value.casefold() in names:
        return Strategy(value.casefold())
    suggestion = did_you_mean(value, names) if isinstance(value, str) else ""
    raise ConfigError(f"strategy {value!r} does not exist.{suggestion} There are: {_listed(names)}.")


def _device(value: torch.device | str | None) -> torch.device | None:
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError as error:
            message = f"device {value!r} is none that torch knows. Write for example 'cpu' or 'cuda:0'."
            raise ConfigError(message) from error
    raise ConfigError(f"device must be a torch.device, a string or None, not {value!r}.")


def _listeners(value: Iterable[PluginChoice]) -> tuple[PluginChoice, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"listeners must be a list of plugins, not {value!r}. Write [{value!r}] for a single one.")
    return tuple(value)


def nbytes_of(value: object) -> int | None:
    """``value``, or the bytes that it spells out; None where it does not."""
    if isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())) and (match[4] or not match[2]):
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " kmgt".index((match[2] or " ").lower()))
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _memory_budget(value: int | str | None) -> int | None:
    if value is None:
        return None
    nbytes = nbytes_of(value)
    if nbytes is None or nbytes <= 0:
        raise ConfigError(f"memory_budget must be bytes above 0, a number or text such as '70 GiB', not {value!r}.")
    return nbytes


def _batch_nbytes(value: int | str) -> int:
    nbytes = nbytes_of(value)
    if nbytes is None or nbytes < 0:
        raise ConfigError(f"batch_nbytes must be bytes, 0 or more, a number or text such as '16 MiB', not {value!r}.")
    return nbytes


@dataclass(frozen=True)
class ShardConfig:
    """How a model is sharded. Validated when it is made; ``dataclasses.replace`` makes a changed copy.

    Raises ``ConfigError`` for a value that a setting cannot take and for settings that exclude each other. Whether a
    named plugin is installed is asked when a model is wrapped, not here.
    """

    collectives: PluginChoice = "auto"
    """What moves bytes between ranks (group ``polyshard.collectives``). ``"auto"`` picks by device."""
    precision: PluginChoice = "none"
    """In which dtypes units compute, travel and reduce (group ``polyshard.precision``)."""
    offload: PluginChoice = "none"
    """Where shards live between uses (group ``polyshard.offload``)."""
    policy: PluginChoice = "never"
    """Which modules become units beside the root (group ``polyshard.policies``)."""
    layout: PluginChoice = "flat"
    """Where in its unit each parameter lies, and so where ranks cut it (group ``polyshard.layouts``)."""
    listeners: _Normalised[tuple[PluginChoice, ...], Iterable[PluginChoice]] = _Normalised(_listeners, ())
    """What watches the step, called in this order (group ``polyshard.plugins``). Read as a tuple."""
    strategy: _Normalised[Strategy, str] = _Normalised(_strategy, Strategy.FULL_SHARD)
    """What each rank keeps: a ``Strategy`` or its string. Read as a ``Strategy``."""
    mesh: DeviceMesh | None = None
    """The ranks to shard over. Two dimensions, (replicate, shard), with a hybrid strategy, otherwise one."""
    shard_size: int | None = None
    """Ranks in each group of a hybrid strategy; None for the ranks of one host. Not together with ``mesh``."""
    reshard_after_forward: bool | Literal["auto"] | None = None
    """Whether units release their parameters after forward. None: as ``strategy`` says. ``"auto"``: as many are kept as
    fit ``memory_budget``, decided after the first optimizer step. No effect on ``NO_SHARD``."""
    memory_budget: _Normalised[int | None, str] = _Normalised(_memory_budget, None)
    """Bytes of device memory that tensors of this process may take at once, for ``reshard_after_forward="auto"``: a
    number, or text such as ``"70 GiB"``. None: what the device has, less a tenth. Read as an int or None."""
    forward_prefetch: int = 1
    """How many units ahead of the computing one are gathered in forward; 0 for none."""
    backward_prefetch: int = 1
    """How many units ahead of the computing one are gathered in backward; 0 for none."""
    batch_nbytes: _Normalised[int, str] = _Normalised(_batch_nbytes, 128 * 2**20)
    """Bytes up to which units that follow each other share a communication: of whole parameters where they are
    prefetched; of gradients, up to 16 MiB, where units of at most a quarter of that are reduced, and, in one launch of
    a communication each, up to 64 MiB, where units of at most half of that are. A number, or text such as
    ``"16 MiB"``; 0 for each unit by itself. Read as an int."""
    split_root: bool = True
    """Whether a large module before all units and one behind them, of a language model embedding and head, are gathered
    and reduced apart from the rest of the root. To be turned off where only some ranks run such a module in a step."""
    device: _Normalised[torch.device | None, str] = _Normalised(_device, None)
    """Where the model computes; None: where its parameters are. Read as a ``torch.device`` or None."""
    timeout_s: float = 600.0
    """Seconds that a collective may wait for another rank."""
    check_ranks: bool = True
    """Whether ranks compare their plugins, plans and values at wrap, and their order of collectives in the first
    step."""
    sync_module_states: bool = False
    """Whether all ranks take rank 0's parameters and buffers at wrap. Their values are then not compared."""

    def __post_init__(self) -> None:
        for name in _PLUGIN_FIELDS:
            _check_choice(name, getattr(self, name))
        for position, choice in enumerate(self.listeners):
            _check_choice(f"listeners[{position}]", choice)
        for name in ("forward_prefetch", "backward_prefetch"):
            ahead = getattr(self, name)
            if not _is_int(ahead) or ahead < 0:
                raise ConfigError(f"{name} must be a number of units, 0 or more, not {ahead!r}.")
        self._check_reshard()
        for name in ("split_root", "check_ranks", "sync_module_states"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float):
            raise ConfigError(f"timeout_s must be a number of seconds, not {self.timeout_s!r}.")
        if not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ConfigError(f"timeout_s must be a finite number of seconds above 0, not {self.timeout_s!r}.")
        self._check_ranks_layout()

    def _check_reshard(self) -> None:
        releases = self.reshard_after_forward
        if not isinstance(releases, bool | None) and releases != "auto":
            raise ConfigError(f"reshard_after_forward must be True, False, None or 'auto', not {releases!r}.")
        if releases == "auto" and not self.strategy.reshards_after_forward:
            able = _listed(strategy.value for strategy in Strategy if strategy.reshards_after_forward)
            raise ConfigError(
                f"reshard_after_forward='auto' needs a strategy that releases parameters after forward ({able}), but "
                f"strategy is {self.strategy.value!r}. Leave reshard_after_forward out or change the strategy."
            )
        if self.memory_budget is not None and releases != "auto":
            raise ConfigError(
                f"memory_budget={self.memory_budget} needs reshard_after_forward='auto', but that is {releases!r}. "
                "Leave memory_budget out or set reshard_after_forward='auto'."
            )

    def _check_ranks_layout(self) -> None:
        hybrids = _listed(strategy.value for strategy in Strategy if strategy.hybrid)
        if self.shard_size is not None:
            if not _is_int(self.shard_size) or self.shard_size < 1:
                raise ConfigError(f"shard_size must be a number of ranks, 1 or more, not {self.shard_size!r}.")
            if self.mesh is not None:
                raise ConfigError("mesh and shard_size both say which ranks share a shard. Give one of them.")
            if not self.strategy.hybrid:
                raise ConfigError(
                    f"shard_size={self.shard_size} needs a hybrid strategy ({hybrids}), but strategy is "
                    f"{self.strategy.value!r}. Leave shard_size out or change the strategy."
                )
        if self.mesh is not None:
            dimensions = getattr(self.mesh, "ndim", None)
            if not _is_int(dimensions):
                raise ConfigError(f"mesh must be a torch.distributed DeviceMesh, not {type(self.mesh).__name__}.")
            wanted = 2 if self.strategy.hybrid else 1
            if dimensions != wanted:
                raise ConfigError(
                    f"strategy {self.strategy.value!r} needs a mesh of {wanted} dimension(s), but this one has "
                    f"{dimensions}. Slice the mesh, or choose "
                    f"{f'one of {hybrids}' if wanted == 1 else 'a strategy that is not hybrid'}."
                )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "the mapping") -> ShardConfig:
        """A configuration from a table of settings, such as a parsed file holds.

        ``source`` is where the table came from, for messages. Raises ``ConfigError`` for a key that does not exist and
        for a value that its setting cannot take.
        """
        for key in mapping:
            if key not in FILE_FIELDS:
                raise ConfigError(_unknown_key(str(key), source))
        try:
            return cls(**mapping)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def from_toml(
        cls, path: str | os.PathLike[str], table: str = "shard", environ: Mapping[str, str] = os.environ
    ) -> ShardConfig:
        """The configuration in ``[table]`` of a TOML file, overridden by ``environ``.

        Raises ``ConfigError`` where the file cannot be read, has no such table, or holds a key or value that does not
        exist. For the names in ``environ`` see ``with_environment``.
        """
        file = Path(path)
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
                f"{file} has no table [{table}].{did_you_mean(table, tables)} Its tables: {_listed(tables) or 'none'}."
            )
        overridden = _overridden(settings, environ)
        if overridden is settings:
            return cls.from_mapping(settings, source=f"[{table}] of {file}")
        # A wrong file is reported as such, before variables that may hide the mistake or be blamed for it.
        for key in settings:
            if key not in FILE_FIELDS:
                raise ConfigError(_unknown_key(key, f"[{table}] of {file}"))
        return cls.from_mapping(overridden, source=f"[{table}] of {file} with {_variables(environ)}")

    def with_environment(self, environ: Mapping[str, str] = os.environ) -> ShardConfig:
        """A copy with the settings that ``environ`` overrides.

        ``POLYSHARD_<FIELD>`` sets a field: a plugin is a name or an inline TOML table, ``POLYSHARD_LISTENERS`` a TOML
        array or names with commas, everything else a TOML value (``none`` for None). ``POLYSHARD_<FIELD>__<OPTION>``
        sets one option of a plugin to a TOML value, or to the text itself where it is none. Naming another plugin
        drops the options of the former one. An empty variable counts as absent. Raises ``ConfigError`` for a variable
        with the prefix that is no setting.
        """
        current = {name: getattr(self, name) for name in FILE_FIELDS}
        overridden = _overridden(current, environ)
        if overridden is current:
            return self
        try:
            return dataclasses.replace(self, **overridden)
        except ConfigError as error:
            raise ConfigError(f"{_variables(environ)}: {error}") from error


_PLUGIN_FIELDS: tuple[str, ...] = ("collectives", "precision", "offload", "policy", "layout")
_TEXT_FIELDS: tuple[str, ...] = ("strategy", "device")
_OPTIONAL_FIELDS: tuple[str, ...] = ("device", "shard_size", "reshard_after_forward", "memory_budget")

#: The settings that a file or the environment can hold: all but ``mesh``, which is an object of the running job.
FILE_FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(ShardConfig) if field.name != "mesh")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_choice(field: str, choice: object) -> None:
    if choice is None or isinstance(choice, bool | int | float | bytes | list | tuple | set | frozenset):
        raise ConfigError(f"{field} must be a plugin's name, a table with a name, or a plugin object, not {choice!r}.")
    try:
        PluginSpec.parse(choice)
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error


def _unknown_key(key: str, source: str) -> str:
    if key == "mesh":
        return f"{source}: 'mesh' is an object and can be given in Python only. Use shard_size here."
    return f"{source}: unknown setting {key!r}.{did_you_mean(key, FILE_FIELDS)} Settings: {_listed(FILE_FIELDS)}."


def _variables(environ: Mapping[str, str]) -> str:
    return _listed(name for name, text in environ.items() if name.startswith(ENVIRONMENT_PREFIX) and text.strip())


def _toml_value(text: str) -> Any:
    """``text`` as a TOML value, or itself where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break could smuggle further keys in: such a text is not one value.
    return parsed["value"] if len(parsed) == 1 else text


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


def _overridden(settings: Mapping[str, Any], environ: Mapping[str, str]) -> Mapping[str, Any]:
    """``settings`` with what ``environ`` sets; ``settings`` itself where that is nothing."""
    fields: dict[str, str] = {}
    options: list[tuple[str, str, str, str]] = []
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or not text.strip():
            continue
        field, separator, option = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if field not in FILE_FIELDS:
            names = [name.upper() for name in FILE_FIELDS]
            raise ConfigError(
                f"environment variable {variable} is no setting."
                f"{did_you_mean(field, names, prefix=ENVIRONMENT_PREFIX)} There are: "
                f"{_listed(ENVIRONMENT_PREFIX + name for name in names)}; options of a plugin are written as "
                f"{ENVIRONMENT_PREFIX}COLLECTIVES__WORLD_SIZE."
            )
        if not separator:
            fields[field] = text
        elif field not in _PLUGIN_FIELDS or option in ("", "name"):
            raise ConfigError(
                f"environment variable {variable} sets no option of a plugin. Write "
                f"{ENVIRONMENT_PREFIX}{field.upper()} for the setting itself; options exist for "
                f"{_listed(_PLUGIN_FIELDS)}."
            )
        else:
            options.append((variable, field, option, text))
    if not fields and not options:
        return settings

    result = dict(settings)
    for field, text in fields.items():
        value = _field_value(field, text)
        former = result.get(field)
        # The same plugin named again keeps the options that the file gave it.
        keeps_options = isinstance(value, str) and isinstance(former, Mapping) and former.get("name") == value
        result[field] = former if keeps_options else value
    defaults = {field.name: field.default for field in dataclasses.fields(ShardConfig)}
    for variable, field, option, text in options:
        choice = result.get(field, defaults[field])
        if isinstance(choice, str):
            choice = {"name": choice}
        if not isinstance(choice, Mapping):
            raise ConfigError(
                f"environment variable {variable} cannot set an option of {field}, which is an object of class "
                f"{type(choice).__name__}. Name the plugin with {ENVIRONMENT_PREFIX}{field.upper()} as well."
            )
        result[field] = {**choice, option: _toml_value(text)}
    return result
