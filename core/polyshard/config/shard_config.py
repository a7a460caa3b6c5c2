"""``ShardConfig``: all settings of sharding in one frozen object, from Python, a TOML file, or the environment."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch

from ..errors import ConfigError, ConfigTypeError, did_you_mean
from ..interfaces import bytes_of
from .sources import (
    GROUP_OF_SETTING,
    Origin,
    PluginChoice,
    Source,
    Sources,
    check_choice,
    overridden,
    read_table,
    sources_in,
    variables,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Strategy(enum.Enum):
    """Which ranks keep parts of what computes (P), of gradients (G), and of what an optimizer steps with its state (O).

    An optimizer has shards with every strategy but ``NO_SHARD``. P are the engine's copies for modules.
    """

    FULL_SHARD = "full_shard"
    """P, G and O are sharded over all ranks; parameters are released after forward and after backward (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """G and O are sharded over all ranks; parameters stay gathered from forward until the end of backward. Also
    ``"zero2"``."""
    ZERO1 = "zero1"
    """O is sharded over all ranks; P stay whole until an optimizer steps, whatever the number of backwards before."""
    NO_SHARD = "no_shard"
    """Every rank keeps P, G and O whole; gradients are all-reduced."""
    HYBRID_SHARD = "hybrid_shard"
    """``FULL_SHARD`` inside groups of ``shard_size`` ranks, replicated between the groups (HSDP). Also ``"hybrid"``."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """``SHARD_GRAD_OP`` inside groups of ``shard_size`` ranks, replicated between the groups."""
    HFSDP = "hfsdp"
    """P are sharded inside groups of ``shard_size`` ranks, G and O over all ranks: groups exchange parameters once a
    step, and forwards and backwards gather inside of a group alone."""
    HPZ = "hpz"
    """``FULL_SHARD``, but what a forward gathered is kept by groups of ``shard_size`` ranks, which gather it for
    backward among themselves (the secondary shards of ZeRO++)."""

    @property
    def hybrid(self) -> bool:
        """Whether shards are replicated between groups of ranks."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)

    @property
    def grouped(self) -> bool:
        """Whether it knows groups of ranks inside the whole, such as those of a host."""
        return self.hybrid or self.joins

    @property
    def joins(self) -> bool:
        """Whether masters are sharded over all of these groups, and not inside of each."""
        return self in (Strategy.HFSDP, Strategy.HPZ)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are released after forward where ``ShardConfig.reshard_after_forward`` is None."""
        return self in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD, Strategy.HFSDP, Strategy.HPZ)


#: Other names of strategies.
_ALIASES = {"zero2": Strategy.SHARD_GRAD_OP, "zero3": Strategy.FULL_SHARD, "hybrid": Strategy.HYBRID_SHARD}


# What a setting is given, as it reads; each raises ConfigError for what the setting cannot take.


def _strategy_of(value: Strategy | str) -> Strategy:
    if isinstance(value, Strategy):
        return value
    names = [strategy.value for strategy in Strategy]
    if isinstance(value, str) and value.casefold() in names:
        return Strategy(value.casefold())
    if isinstance(value, str) and value.casefold() in _ALIASES:
        return _ALIASES[value.casefold()]
    # torch's own have the names of ours.
    suggestion = did_you_mean(str(getattr(value, "name", value)), names)
    raise ConfigError(f"strategy {value!r} does not exist.{suggestion} There are: {', '.join(names)}.")


def _device_of(value: torch.device | str | None) -> torch.device | None:
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError as error:
            message = f"device {value!r} is none that torch knows. Write for example 'cpu' or 'cuda:0'."
            raise ConfigError(message) from error
    raise ConfigError(f"device must be a torch.device, a string or None, not {value!r}.")


def _listeners_of(value: Iterable[PluginChoice]) -> tuple[PluginChoice, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"listeners must be a list of plugins, not {value!r}. Write [{value!r}] for a single one.")
    return tuple(value)


def _memory_budget_of(value: int | str | None) -> int | None:
    if value is None:
        return None
    nbytes = bytes_of(value)
    if nbytes is None or nbytes <= 0:
        raise ConfigError(f"memory_budget must be bytes above 0, a number or text such as '70 GiB', not {value!r}.")
    return nbytes


def _batch_nbytes_of(value: int | str) -> int:
    nbytes = bytes_of(value)
    if nbytes is None or nbytes < 0:
        raise ConfigError(f"batch_nbytes must be bytes, 0 or more, a number or text such as '16 MiB', not {value!r}.")
    return nbytes


def _dimensions_of(value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not names or len(set(map(repr, names))) != len(names) or not all(isinstance(n, str) and n for n in names):
        # That of a file, [shard], with its name.
        remedy = "Give the settings in it alone." if isinstance(value, Mapping) else "Write 'dp'."
        raise ConfigError(f"dimensions of a mesh are a name or several different ones, not {value!r}. {remedy}")
    return names


def _part_of_dimensions(value: bool | str | Sequence[str]) -> bool | tuple[str, ...]:
    return value if isinstance(value, bool) else _dimensions_of(value) or True


#: Limits of ``timeout_s``: process groups count in milliseconds, where 0 is no limit, and in nanoseconds.
_LEAST_S, _MOST_S = 1e-3, 1e8

_Stored = TypeVar("_Stored")
_Accepted = TypeVar("_Accepted")


class _Normalised(Generic[_Stored, _Accepted]):
    """A dataclass field that takes several spellings of a value and always reads as one type."""

    def __init__(self, convert: Callable[[_Stored | _Accepted], _Stored], default: _Stored) -> None:
        self.convert = convert
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object | None, owner: type) -> _Stored:
        if instance is None:
            return self._default
        value: _Stored = instance.__dict__[self._name]
        return value

    def __set__(self, instance: object, value: _Stored | _Accepted) -> None:
        instance.__dict__[self._name] = self.convert(value)


_Settings = TypeVar("_Settings")


def _naming_the_nearest(cls: type[_Settings]) -> type[_Settings]:
    """``cls``, a dataclass, which refuses a keyword that is none of its fields with the nearest one.

    The error of the function that a dataclass has for its fields names none. This one keeps its signature.
    """
    init = cls.__init__

    @wraps(init)
    def checked(self: _Settings, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in _fields():
                raise ConfigTypeError(_unknown(name, cls.__name__, _fields()))
        init(self, *args, **settings)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@_naming_the_nearest
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
    listeners: _Normalised[tuple[PluginChoice, ...], Iterable[PluginChoice]] = _Normalised(_listeners_of, ())
    """What watches the step, called in this order (group ``polyshard.plugins``). Read as a tuple."""
    strategy: _Normalised[Strategy, str] = _Normalised(_strategy_of, Strategy.FULL_SHARD)
    """What each rank keeps: a ``Strategy`` or its string. Read as a ``Strategy``."""
    mesh: DeviceMesh | None = None
    """All ranks of the model. Where ``shard`` names none, its dimensions are (replicate, shard) with a strategy that
    has groups (the hybrid ones, ``hfsdp``, ``hpz``), otherwise the one to shard over."""
    shard: _Normalised[tuple[str, ...] | None, str | Sequence[str]] = _Normalised(_dimensions_of, None)
    """The dimensions of ``mesh`` to shard over: a name, or several, whose ranks then share shards as if they were one.
    In those that are neither these nor in ``replicate``, ranks hold other parts of the model (tensor parallelism,
    experts), or copies. Read as a tuple or None."""
    replicate: _Normalised[tuple[str, ...] | None, str | Sequence[str]] = _Normalised(_dimensions_of, None)
    """The dimensions of ``mesh`` over which a hybrid strategy replicates shards. With ``hfsdp`` and ``hpz`` those that
    ``shard`` is the inside of: masters are sharded over both. Read as a tuple or None."""
    shard_parameters: _Normalised[bool | tuple[str, ...], str | Sequence[str]] = _Normalised(_part_of_dimensions, True)
    """Over which of the dimensions in ``shard`` the parameters that compute are sharded, too: True for all, False for
    none, as ``zero1`` says, or names of some, as ``hfsdp`` says of groups. Read as a bool or a tuple."""
    shard_gradients: bool = False
    """Whether backwards under ``no_sync`` reduce gradients to shards, which wait there, and not whole ones: inside of
    groups with a strategy that has these, and otherwise over all ranks, into ``.grad``."""
    shard_size: int | None = None
    """Ranks in each group of a strategy that has groups; None for the ranks of one host. Not together with ``mesh``."""
    reshard_after_forward: bool | int | Literal["auto"] | None = None
    """Whether units release their parameters after forward. None: as ``strategy`` says. A number ``n`` that divides the
    number of shards: each rank keeps ``1/n``, which ``n`` neighbours gather for backward; 1 is False. ``"auto"``: as
    many units are kept as fit ``memory_budget``, decided after the first optimizer step. No effect on ``NO_SHARD``.
    ``zero1`` and ``hpz`` say that themselves, and ``hfsdp`` takes no number.
    """
    memory_budget: _Normalised[int | None, str] = _Normalised(_memory_budget_of, None)
    """Bytes of device memory that tensors of this process may take at once, for ``reshard_after_forward="auto"``: a
    number, or text such as ``"70 GiB"``. None: what the device has, less a tenth. Read as an int or None."""
    forward_prefetch: int = 1
    """How many units ahead of the computing one are gathered in forward; 0 for none."""
    backward_prefetch: int = 1
    """How many units ahead of the computing one are gathered in backward; 0 for none."""
    batch_nbytes: _Normalised[int, str] = _Normalised(_batch_nbytes_of, 128 * 2**20)
    """Bytes up to which units that follow each other share a communication: of whole parameters where they are
    prefetched; of gradients, up to 16 MiB, where units of at most a quarter of that are reduced, and, in one launch of
    a communication each, up to 128 MiB, where units of at most 32 MiB are. A number, or text such as ``"16 MiB"``; 0
    for each unit by itself. Read as an int."""
    split_root: bool = True
    """Whether a large module before all units and one behind them, of a language model embedding and head, are gathered
    and reduced apart from the rest of the root. To be turned off where only some ranks run such a module in a step."""
    device: _Normalised[torch.device | None, str] = _Normalised(_device_of, None)
    """Where the model computes; None: where its parameters are. Read as a ``torch.device`` or None."""
    timeout_s: float = 600.0
    """Seconds that a collective may wait for another rank: from 0.001 to 1e8."""
    check_ranks: bool | Literal["always"] = True
    """Whether ranks compare their plugins, plans and values at wrap, and their collectives in the first step, or
    ``"always"``, at the price of an exchange for each; and whether they tell each other of failures."""
    sync_module_states: bool = False
    """Whether all ranks take rank 0's parameters and buffers at wrap. Their values are then not compared."""

    #: Sources of values, where known. Not a field: equal settings make equal configurations.
    _sources: ClassVar[Sources] = {}

    def __post_init__(self) -> None:
        for name in _fields():
            _check_value(name, getattr(self, name))
        _raise_all(_mistakes([self._check_reshard, self._check_ranks_layout, self._check_parameters]))
        if self.mesh is not None:
            self._check_mesh(self.mesh)

    def _check_reshard(self) -> None:
        releases = self.reshard_after_forward
        if releases == "auto" and not self.strategy.reshards_after_forward:
            able = ", ".join(strategy.value for strategy in Strategy if strategy.reshards_after_forward)
            raise ConfigError(
                f"reshard_after_forward='auto' needs a strategy that releases parameters after forward ({able}), but "
                f"strategy is {self.strategy.value!r}. Leave reshard_after_forward out or change the strategy."
            )
        keeps, part = self.keeps_parameters, isinstance(self.shard_parameters, tuple)
        alone = keeps or self.strategy is Strategy.HPZ
        if (alone and releases is not None) or ((part or self.strategy is Strategy.HFSDP) and _is_int(releases)):
            given = f"strategy {self.strategy.value!r}"
            if self.shard_parameters is not True:
                given = f"shard_parameters={self.shard_parameters!r}"
            raise ConfigError(
                f"reshard_after_forward={releases!r} does not go with {given}, which says itself what stays behind a "
                f"forward. Leave it out{'' if alone else ', or give True, False or auto'}."
            )
        if self.memory_budget is not None and releases != "auto":
            raise ConfigError(
                f"memory_budget={self.memory_budget} needs reshard_after_forward='auto', but that is {releases!r}. "
                "Leave memory_budget out or set reshard_after_forward='auto'."
            )

    def _check_ranks_layout(self) -> None:
        grouped = ", ".join(strategy.value for strategy in Strategy if strategy.grouped)
        if self.shard_size is not None:
            if self.mesh is not None:
                raise ConfigError("mesh and shard_size both say which ranks share a shard. Give one of them.")
            if not self.strategy.grouped:
                raise ConfigError(
                    f"shard_size={self.shard_size} needs a strategy with groups ({grouped}), but strategy is "
                    f"{self.strategy.value!r}. Leave shard_size out or change the strategy."
                )
        self._check_dimensions(grouped)

    def _check_dimensions(self, grouped: str) -> None:
        """Of ``shard`` and ``replicate``: what can be told without the mesh, which may come later."""
        if self.shard is None and self.replicate is None:
            return
        if self.shard_size is not None:
            raise ConfigError(
                "shard_size and names of dimensions both say which ranks share a shard. Give one of them."
            )
        if self.replicate is not None and not self.strategy.grouped:
            raise ConfigError(
                f"replicate={_quoted(self.replicate)} needs a strategy with groups ({grouped}), but strategy is "
                f"{self.strategy.value!r}. Leave replicate out or change the strategy."
            )
        if self.strategy.grouped and (self.shard is None or self.replicate is None):
            there, lacks = ("replicate", "shard") if self.shard is None else ("shard", "replicate")
            raise ConfigError(
                f"strategy {self.strategy.value!r} needs dimensions to shard over and to replicate over, but only "
                f"{there}={_quoted(getattr(self, there))} is given. Name those of {lacks}, too."
            )
        for name in self.replicate or ():
            if name in (self.shard or ()):
                raise ConfigError(f"dimension {name!r} is in both shard and replicate. Name it in one of them.")

    def _check_parameters(self) -> None:
        chosen = self.shard_parameters
        if chosen is True:
            return
        if self.strategy is Strategy.NO_SHARD or self.strategy.joins:
            raise ConfigError(
                f"shard_parameters={chosen!r} does not go with strategy {self.strategy.value!r}, which says itself "
                "over what parameters are sharded. Leave it out or change the strategy."
            )
        for name in () if chosen is False else chosen:
            if name not in (self.shard or ()):
                known = self.shard or ()
                raise ConfigError(
                    f"shard_parameters names {name!r}, which shard has not.{did_you_mean(name, known)} An optimizer's "
                    f"state is sharded over at least what parameters are: shard={_quoted(known) if known else None}."
                )

    @property
    def keeps_parameters(self) -> bool:
        """Whether parameters that compute stay whole until an optimizer steps."""
        return self.strategy is Strategy.ZERO1 or self.shard_parameters is False

    def _check_mesh(self, mesh: DeviceMesh) -> None:
        dimensions = getattr(mesh, "ndim", None)
        if not isinstance(dimensions, int):
            raise ConfigError(f"mesh must be a torch.distributed DeviceMesh, not {type(mesh).__name__}.")
        known = getattr(mesh, "mesh_dim_names", None) or ()
        for setting in ("shard", "replicate"):
            for name in getattr(self, setting) or ():
                if not known:
                    raise ConfigError(
                        f"{setting} names the dimension {name!r}, but those of the mesh have no names. Make it with "
                        "mesh_dim_names=."
                    )
                if name not in known:
                    raise ConfigError(
                        f"{setting} names {name!r}, which is no dimension of the mesh.{did_you_mean(name, known)} It "
                        f"has: {', '.join(known)}. One that was made of others is given as these."
                    )
        wanted = 2 if self.strategy.grouped else 1
        if self.shard is None and dimensions != wanted:
            grouped = ", ".join(strategy.value for strategy in Strategy if strategy.grouped)
            instead = f"choose {f'one of {grouped}' if wanted == 1 else 'a strategy without groups'}."
            if dimensions > wanted:
                names = "shard=" if wanted == 1 else "shard= and replicate="
                instead = f"name those to use in {names}, or " + (
                    f"{instead}" if dimensions == 2 else "slice the mesh."
                )
            listed = f" ({', '.join(known)})" if known else ""
            raise ConfigError(
                f"strategy {self.strategy.value!r} needs a mesh of {wanted} dimension(s), but this one has "
                f"{dimensions}{listed}. {instead[0].upper()}{instead[1:]}"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], source: str = "the mapping") -> ShardConfig:
        """A configuration from a table of settings, such as a parsed file holds.

        ``source`` is where the table came from, for messages. Raises ``ConfigError`` for a key that does not exist and
        for a value that its setting cannot take.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigTypeError(f"{source} is {mapping!r}, no table of settings.{_instead_of(mapping)}")
        return cls._from_table(mapping, sources_in(mapping, Source(Origin.CODE, source)), source)

    @classmethod
    def from_toml(
        cls,
        path: str | os.PathLike[str],
        table: str = "shard",
        environ: Mapping[str, str] = os.environ,
        mesh: DeviceMesh | None = None,
    ) -> ShardConfig:
        """The configuration in ``[table]`` of a TOML file, overridden by ``environ``, over the ranks of ``mesh``.

        Raises ``ConfigError`` where the file cannot be read, has no such table, or holds a key or value that does not
        exist: one error for all mistakes of the file. For the names in ``environ`` see ``with_environment``.
        """
        if not isinstance(path, str | os.PathLike) or not isinstance(table, str):
            raise ConfigTypeError(
                f"ShardConfig.from_toml reads a table of a file, not {table!r} of {path!r}.{_instead_of(path)}"
            )
        settings, where = read_table(Path(path), table, FILE_FIELDS), f"[{table}] of {Path(path)}"
        # A wrong file is reported as such, before variables that may hide the mistake or be blamed for it.
        _refuse_wrong(settings, where)
        sources = sources_in(settings, Source(Origin.FILE, where))
        result, sources_after = overridden(settings, sources, environ, _defaults())
        if result is not settings:
            where += f" with {variables(environ)}"
        return cls._from_table(result, sources_after, where, mesh)

    def with_environment(self, environ: Mapping[str, str] = os.environ) -> ShardConfig:
        """A copy with the settings that ``environ`` overrides.

        ``POLYSHARD_<FIELD>`` sets a field: a plugin is a name or an inline TOML table, ``POLYSHARD_LISTENERS``,
        ``POLYSHARD_SHARD`` and ``POLYSHARD_REPLICATE`` a TOML array or names with commas, everything else a TOML value
        (``none`` for None). ``POLYSHARD_<FIELD>__<OPTION>`` sets one option of a plugin to a TOML value, or to the text
        itself where it is not TOML. Naming another plugin drops the options of the former one. An empty variable counts
        as absent. Raises ``ConfigError`` for a variable with the prefix that is no setting.
        """
        current = {name: getattr(self, name) for name in FILE_FIELDS}
        sources = {key: self.source_of(*key) for key in sources_in(current, Source(Origin.CODE))}
        result, sources_after = overridden(current, sources, environ, _defaults())
        if result is current:
            return self
        try:
            return dataclasses.replace(self, **result)._coming_from(sources_after)
        except ConfigError as error:
            raise ConfigError(f"{variables(environ)}: {error}") from error

    def source_of(self, setting: str, option: str | None = None) -> Source:
        """The source of ``setting``, or of an ``option`` of the plugin that it names.

        A configuration that ``dataclasses.replace`` made is the program's: settings count as its own where they are not
        the defaults. Raises ``ConfigError`` for a setting that does not exist.
        """
        if setting not in _fields():
            raise ConfigError(f"there is no setting {setting!r}.{did_you_mean(setting, _fields())}")
        found = self._sources.get((setting, option)) or self._sources.get((setting, None))
        if found is None:
            default = getattr(self, setting) == _fields()[setting].default
            found = Source(Origin.DEFAULT if default else Origin.CODE)
        return found

    @classmethod
    def _from_table(
        cls, table: Mapping[str, Any], sources: Sources, where: str, mesh: DeviceMesh | None = None
    ) -> ShardConfig:
        _refuse_wrong(table, where)
        try:
            return cls(**table, mesh=mesh)._coming_from(sources)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    def _coming_from(self, sources: Sources) -> ShardConfig:
        object.__setattr__(self, "_sources", dict(sources))
        return self


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(ShardConfig)}


#: The settings that a file or the environment can hold: all but ``mesh``, which is an object of the running job.
FILE_FIELDS: tuple[str, ...] = tuple(name for name in _fields() if name != "mesh")


def _defaults() -> dict[str, Any]:
    return {name: field.default for name, field in _fields().items() if name in FILE_FIELDS}


def _refuse_wrong(table: Mapping[str, Any], where: str) -> None:
    """Raise one ``ConfigError`` for all keys that do not exist and all values that their settings cannot take."""
    mistakes = _mistakes(partial(_check_setting, key, value) for key, value in table.items())
    unknown = any(key not in (*FILE_FIELDS, "mesh") for key in table)
    _raise_all(mistakes, f"{where}: ", f"Settings: {', '.join(FILE_FIELDS)}." if unknown else "")


def _check_setting(key: str, value: Any) -> None:
    if key == "mesh":
        raise ConfigError(
            "'mesh' is an object and can be given in Python only, as ShardConfig.from_toml(path, mesh=mesh). Use "
            "shard_size here, or name its dimensions in shard."
        )
    if key not in FILE_FIELDS:
        raise ConfigError(f"unknown setting {str(key)!r}.{did_you_mean(str(key), FILE_FIELDS)}")
    normalised = vars(ShardConfig).get(key)
    _check_value(key, normalised.convert(value) if isinstance(normalised, _Normalised) else value)


def _check_value(name: str, value: Any) -> None:
    """Raise ``ConfigError`` where the setting ``name`` cannot take ``value``, whatever the others are."""
    match name:
        case "listeners":
            for position, choice in enumerate(value):
                check_choice(f"listeners[{position}]", choice)
        case "forward_prefetch" | "backward_prefetch":
            _require(_is_int(value) and value >= 0, f"{name} must be a number of units, 0 or more, not {value!r}.")
        case "reshard_after_forward":
            known = isinstance(value, bool | None) or value == "auto" or (_is_int(value) and value > 0)
            _require(known, f"{name} must be True, False, None, 'auto' or a number of ranks, 1 or more, not {value!r}.")
        case "check_ranks":
            known = isinstance(value, bool) or value == "always"
            _require(known, f"{name} must be True, False or 'always', not {value!r}.")
        case "split_root" | "sync_module_states" | "shard_gradients":
            _require(isinstance(value, bool), f"{name} must be True or False, not {value!r}.")
        case "timeout_s":
            seconds = isinstance(value, int | float) and not isinstance(value, bool)
            _require(seconds, f"{name} must be a number of seconds, not {value!r}.")
            _require(
                _LEAST_S <= value <= _MOST_S,
                f"{name} must be a finite number of seconds above 0, {_LEAST_S:g} at least and {_MOST_S:g} (three "
                f"years) at most, not {value!r}.",
            )
        case "shard_size":
            known = value is None or (_is_int(value) and value >= 1)
            _require(known, f"{name} must be a number of ranks, 1 or more, not {value!r}.")
        case _ if name in GROUP_OF_SETTING:
            check_choice(name, value)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _mistakes(checks: Iterable[Callable[[], None]]) -> list[str]:
    """What the ``ConfigError``s of ``checks`` say."""
    found = []
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found.append(str(error))
    return found


def _raise_all(mistakes: Sequence[str], where: str = "", remedy: str = "") -> None:
    """Raise one ``ConfigError`` for ``mistakes``, in a line each where there are several."""
    told = [*mistakes, *([remedy] if remedy else [])]
    if len(mistakes) == 1:
        raise ConfigError(where + " ".join(told))
    if mistakes:
        raise ConfigError("\n  ".join([f"{where}{len(mistakes)} mistakes:", *told]))


def _unknown(name: str, where: str, known: Iterable[str]) -> str:
    return f"{where}: unknown setting {name!r}.{did_you_mean(name, known)} Settings: {', '.join(known)}."


def config_of(config: ShardConfig | None, call: str) -> ShardConfig:
    """``config``, which ``call`` was given; the defaults for None. Raises ConfigTypeError: it is a table, a path."""
    if config is None:
        return ShardConfig()
    if not isinstance(config, ShardConfig):
        given: object = config
        shown = repr(given) if isinstance(given, Mapping | str | os.PathLike) else f"a {type(given).__name__}"
        raise ConfigTypeError(f"{call} takes a ShardConfig, not {shown}.{_instead_of(given)}")
    return config


def _instead_of(value: object) -> str:
    """The call that makes a configuration of ``value``, in a sentence; empty for none."""
    if isinstance(value, Mapping):
        return f" Write ShardConfig.from_mapping({value!r})."
    if isinstance(value, str) and value in [strategy.value for strategy in Strategy]:
        return f" Write ShardConfig(strategy={value!r})."
    if isinstance(value, str | os.PathLike):
        return f" Write ShardConfig.from_toml({os.fspath(value)!r})."
    return " Write ShardConfig(), with the settings in it." if value is ShardConfig else ""


def _quoted(names: Sequence[str]) -> str:
    return repr(names[0] if len(names) == 1 else list(names))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
