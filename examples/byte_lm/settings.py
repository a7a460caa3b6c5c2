"""What one run is asked to do: ``run.toml``, then the environment, then the command line."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polyshard
import torch
from polyshard.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_AT_LEAST_ONE = (
    "width",
    "layers",
    "heads",
    "context",
    "steps",
    "batch",
    "report_every",
    "eval_every",
    "eval_batches",
    "checkpoint_every",
    "pretend_world_size",
)


@dataclass(frozen=True)
class RunSettings:
    """The table ``[run]``; ``run.toml`` says what each setting means."""

    width: int = 128
    layers: int = 6
    heads: int = 4
    context: int = 128
    steps: int = 400
    batch: int = 24
    lr: float = 4e-3
    warmup: int = 40
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 0
    dtype: str = "fp32"
    report_every: int = 10
    eval_every: int = 50
    eval_batches: int = 8
    checkpoint_every: int = 100
    output: str = "runs/byte_lm"
    prompt: str = "def "
    sample: int = 300
    temperature: float = 0.7
    pretend_world_size: int = 1024

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), type(field.default))
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} is {getattr(self, name)}. Give at least 1.")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"run.dtype {self.dtype!r} does not exist. There are: {', '.join(_DTYPES)}.")
        if self.width % self.heads:
            raise ConfigError(f"run.width {self.width} is not divisible by run.heads {self.heads}. Change one of them.")
        if not self.prompt:
            raise ConfigError("run.prompt is empty. Give the model at least one byte to go on from.")

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of the parameters that the optimizer updates."""
        return _DTYPES[self.dtype]


@dataclass(frozen=True)
class Settings:
    """Everything that a run was asked."""

    run: RunSettings
    shard: polyshard.ShardConfig

    @property
    def pretends(self) -> bool:
        """Whether this process stands alone and plays one rank of many."""
        return plugin_name(self.shard.collectives) == "fake"


def plugin_name(choice: polyshard.config.PluginChoice) -> str:
    """The name under which ``choice`` asks for a plugin."""
    return str(choice.get("name", "")) if isinstance(choice, Mapping) else str(choice)


def load_settings(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    verify: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings in the file ``path``, overridden by ``environ`` and then by ``overrides``.

    ``overrides``: texts such as ``"run.steps=10"``, ``"shard.offload=cpu"`` or ``"shard.collectives.world_size=8"``.
    ``verify``: take the table ``[verify]`` over ``[run]``. Raises ``ConfigError``.
    """
    run_changes: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for override in overrides:
        table, key, text = _split(override)
        if table == "run":
            run_changes[key] = _toml_value(text)
        else:
            variables["POLYSHARD_" + key.upper().replace(".", "__")] = text
    shard = polyshard.ShardConfig.from_toml(path, environ={**environ, **variables})
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    pretends = plugin_name(shard.collectives) == "fake"
    run_table: dict[str, Any] = {}
    for table, wanted in (("run", True), ("pretend", pretends), ("verify", verify)):
        if wanted:
            run_table.update(_known(document.get(table, {}), f"[{table}] of {path}"))
    run = RunSettings(**{**run_table, **_known(run_changes, "the command line")})
    if pretends:
        options = dict(shard.collectives) if isinstance(shard.collectives, Mapping) else {"name": shard.collectives}
        options.setdefault("world_size", run.pretend_world_size)
        shard = dataclasses.replace(shard, collectives=options)
    return Settings(run, shard)


def _split(override: str) -> tuple[str, str, str]:
    name, equals, text = override.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and key) or table not in ("run", "shard"):
        raise ConfigError(f"{override!r} sets nothing. Write run.NAME=VALUE or shard.NAME=VALUE.")
    if table == "shard":
        _require_known(key.partition(".")[0], _names(polyshard.ShardConfig), "the command line")
    return table, key, text.strip()


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _known(table: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    for key in table:
        _require_known(key, _names(RunSettings), where)
    return table


def _require_known(key: str, names: list[str], where: str) -> None:
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{where}: unknown setting {key!r}.{hint} Settings: {', '.join(names)}.")


def _names(settings: type[RunSettings] | type[polyshard.ShardConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(settings)]


def _check_type(name: str, value: object, kind: type) -> None:
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise ConfigError(f"run.{name} is {value!r}. Give a value of type {kind.__name__}.")
