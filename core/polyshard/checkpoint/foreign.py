"""Directories of ``torch.distributed.checkpoint`` that somebody else wrote, as sources of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ..errors import ConfigError
from ..state.held import require_name
from ..state.places import MODEL, OPTIMIZER
from ..state.source import Source, listed, opening

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
#: Of a list of names that is put together, not read. No key of a checkpoint begins so.
_MADE = "\0"


@dataclass(frozen=True)
class DcpKeys:
    """Where in a saved state dict the model and the optimizer are.

    Each is the key of a top-level entry, a tuple of keys that lead there (``("app", "model")``), or ``()`` where the
    names are at the top themselves.
    """

    model: str | tuple[str, ...] = "model"
    optimizer: str | tuple[str, ...] = "optimizer"

    def path(self, what: str) -> tuple[str, ...]:
        """The keys that lead to ``what``, ``model`` or ``optimizer``."""
        given: str | tuple[str, ...] = self.model if what == MODEL else self.optimizer
        return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class ForeignSource(Source):
    """A state dict of the forms that ``torch.distributed.checkpoint.state_dict`` gives, flattened or not."""

    directory: Path
    metadata: Metadata
    keys: DcpKeys
    groups: Sequence[Sequence[str]] = ()
    """The parameters' names in each group of the optimizer that is loaded: a flattened state dict knows no groups."""
    remedy: str = "the ranks that wrote it did not all write. Save it again."
    _paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    _aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _made: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the model.

        Raises:
            ConfigError: there is nothing where it is said to be.
        """
        self._paths.update(self._model_paths())

    def find_optimizer(self) -> None:
        """Know the optimizer, too.

        Raises:
            ConfigError: there is nothing where it is said to be, or its state is by numbers.
        """
        found = self._optimizer_paths()
        if not found:
            raise self._nothing("optimizer", self.keys.optimizer)
        self._paths.update(found)

    @property
    def described(self) -> str:
        return f"the directory {self.directory}"

    def read(self, targets: dict[str, Any]) -> None:
        wanted = {key: target for key, target in targets.items() if key not in self._made}
        # Settings of a flattened state dict are there once a parameter, and one group's must agree.
        beside = {other: _like(targets[key]) for key in wanted for other in self._aliases.get(key, ())}
        both = {**beside, **wanted}
        read_state(self.directory, both, self.metadata)
        targets.update({key: both[key] for key in wanted})
        targets.update({key: names for key, names in self._made.items() if key in targets})
        for key in wanted:
            for other in self._aliases.get(key, ()):
                if not _same(both[key], both[other]):
                    raise ConfigError(
                        f"{opening(self)} has {both[key]} as '{key}' but "
                        f"{both[other]} as '{other}', and the optimizer has both parameters in one group. Make its "
                        "groups as they were when it was saved."
                    )

    def entry(self, key: str) -> Any | None:
        return BytesStorageMetadata() if key in self._made else self.metadata.state_dict_metadata.get(key)

    def paths(self, *prefix: str) -> dict[str, tuple[Any, ...]]:
        return {key: path for key, path in self._paths.items() if path[: len(prefix)] == prefix}

    def _below(self, what: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        start = self.keys.path(what)
        for key, whole in (self.metadata.planner_data or {}).items():
            path = tuple(whole)
            if path[: len(start)] == start and key in self.metadata.state_dict_metadata:
                yield key, path[len(start) :]

    def _model_paths(self) -> dict[str, tuple[Any, ...]]:
        found = {key: (MODEL, path[0]) for key, path in self._below(MODEL) if len(path) == 1}
        if not found:
            raise self._nothing("model", self.keys.model)
        return found

    def _optimizer_paths(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        settings: dict[str, dict[str, str]] = {}
        for key, path in self._below(OPTIMIZER):
            if path[0] == _STATE and len(path) == 3:
                require_name(path[1])
                found[key] = (OPTIMIZER, *path)
            elif path[0] == _GROUPS and len(path) == 3:
                found[key] = (OPTIMIZER, *path)
            elif len(path) == 1 and path[0].startswith(f"{_STATE}."):
                name, _, state = path[0].removeprefix(f"{_STATE}.").rpartition(".")
                found[key] = (OPTIMIZER, _STATE, name, state)
            elif len(path) == 1 and path[0].startswith(f"{_GROUPS}."):
                name, _, setting = path[0].removeprefix(f"{_GROUPS}.").rpartition(".")
                settings.setdefault(name, {})[setting] = key
        if settings:
            found.update(self._grouped(settings))
        return found

    def _grouped(self, settings: dict[str, dict[str, str]]) -> dict[str, tuple[Any, ...]]:
        """The paths of groups, made of what a flattened state dict has for each parameter."""
        found: dict[str, tuple[Any, ...]] = {}
        left = set(settings).difference(*self.groups)
        for index, names in enumerate(self.groups):
            members = [name for name in names if name in settings]
            for setting, key in settings[members[0]].items() if members else ():
                found[key] = (OPTIMIZER, _GROUPS, index, setting)
                self._aliases[key] = tuple(settings[name][setting] for name in members[1:] if setting in settings[name])
            made = f"{_MADE}{index}"
            found[made] = (OPTIMIZER, _GROUPS, index, _PARAMS)
            # What no group of the optimizer has makes the first one differ, by name.
            self._made[made] = [*members, *(sorted(left) if index == 0 else ())]
        return found

    def _nothing(self, what: str, given: str | tuple[str, ...]) -> ConfigError:
        top = sorted({str(path[0]) for path in (self.metadata.planner_data or {}).values()})
        return ConfigError(
            f"{opening(self)} has no {what} at {given!r}; at the top it has "
            f"{listed(top)}. Say where it is: DcpKeys({what}=...)."
        )


def _like(target: Any) -> Any:
    return torch.empty_like(target) if isinstance(target, torch.Tensor) else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def read_metadata(directory: Path) -> Metadata:
    """What the directory holds."""
    return FileSystemReader(directory).read_metadata()


def read_state(directory: Path, targets: dict[str, Any], metadata: Metadata) -> None:
    """Fill the tensors of ``targets`` in place and replace its other values, by key of the checkpoint.

    Each rank reads by itself: what it needs depends on no other rank.
    """
    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    plan = reader.prepare_global_plan(plans)[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
