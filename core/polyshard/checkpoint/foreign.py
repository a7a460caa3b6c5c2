"""Directories that others wrote by ``torch.distributed.checkpoint``, read into a model and its optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import ConfigError, StateError
from ..inspect import savable_model
from ..io.boxes import Box
from ..state.contents import Joint, Optimizers
from ..state.exchange import notify_listeners, require_same, together
from ..state.restore import Restore
from ..state.sharded import MODEL, OPTIMIZER, holdings
from ..state.source import Entry, Source, listed, opening, require_name, same_values
from .loading import REMEDY, require_file_seen
from .reading import readable
from .storage import place_of

#: What ``torch.distributed.checkpoint`` describes a directory in.
_METADATA = ".metadata"


def load_dcp(
    directory: Path, model: nn.Module, optimizer: Optimizers | None = None, *, keys: DcpKeys | None = None
) -> None:
    """Read a directory that somebody wrote by ``torch.distributed.checkpoint.save``: from FSDP2, DDP or one process.

    The state dict that was saved has the forms of ``torch.distributed.checkpoint.state_dict.get_state_dict``, its
    optimizer flattened or not. Each rank reads what it holds; the number of ranks does not matter. Parameters and
    buffers change in place; an optimizer that never stepped is given its state. Of the optimizer's class such a
    directory says nothing; settings that are on or off are compared. Every rank calls it, between steps.

    Such directories are made of pickles, which can execute anything when they are read: to call this is to say that you
    trust everybody who could write there.

    Args:
        directory: Where the file ``.metadata`` is.
        model: The outermost sharded module.
        optimizer: As in ``load``; None leaves the saved one alone.
        keys: Where in the saved state dict both are; ``DcpKeys()``, ``"model"`` and ``"optimizer"``, where None.

    Raises:
        StateError: the directory is none of DCP, or damaged; inside a step; ``model`` is not the outermost sharded
            module.
        ConfigError: it holds another model or optimizer, or neither under these keys; nothing was changed.
        RankMismatchError: another rank failed, or was given another directory.
        OSError: reading failed; the model may hold parts of what was read.
    """
    sharded = savable_model(model, "checkpoint.load_dcp()")
    with sharded.meeting("load of a checkpoint", (sharded.collectives,)):
        collectives = sharded.collectives
        called: dict[str, object] = {}
        require_file_seen(collectives, directory, _METADATA)
        opening = f"Opening the directory {directory}"
        with together(collectives, opening, called), readable(directory, collectives.rank):
            directory = _local(directory)
            joint = None if optimizer is None else Joint(optimizer)
            called.update(optimizer=str(joint and joint.signature), keys=keys)
            held = {} if joint is None else holdings(sharded, joint.groups)
            groups = [
                [name for parameter in group["params"] for name in held[parameter].names]
                for group in (() if joint is None else joint.groups)
            ]
            source = ForeignSource(directory, read_metadata(directory), keys or DcpKeys(), groups)
            identity = hashlib.sha256((directory / _METADATA).read_bytes()).hexdigest()
        require_same(collectives, directory, identity, REMEDY)
        with together(collectives, f"Matching the directory {directory}"), readable(directory, collectives.rank):
            if joint is not None:
                source.find_optimizer()
            restore = Restore(source, sharded, model, joint, rank=collectives.rank)
        with together(collectives, f"Reading the directory {directory}"), readable(directory, collectives.rank):
            source.read(restore.targets)
            restore.commit()
        notify_listeners(collectives, f"the load of {directory}", partial(sharded.notify_loaded, model, directory))


def read_metadata(directory: Path) -> Metadata:
    """What a directory of ``torch.distributed.checkpoint`` holds. Raises StateError: it is none."""
    if not (directory / _METADATA).is_file():
        raise StateError(
            f"{directory} was not written by torch.distributed.checkpoint: it has no file '{_METADATA}', or its save "
            "did not end. Name the directory that was checkpoint_id of the save."
        )
    return FileSystemReader(directory).read_metadata()


def _local(directory: object) -> Path:
    """Raises ConfigError: it is no local path."""
    place = place_of(directory, "directory")
    if not isinstance(place, Path):
        raise ConfigError(f"directory is {place!r}: load_dcp reads local paths alone. Copy it, and give that path.")
    return place


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


class ForeignSource(Source):
    """A state dict of the forms that ``torch.distributed.checkpoint.state_dict`` gives, flattened or not."""

    remedy = "the ranks that wrote it did not all write. Save it again."

    def __init__(self, directory: Path, metadata: Metadata, keys: DcpKeys, groups: Sequence[Sequence[str]]) -> None:
        """``groups``: the parameters' names in each group of the optimizer: a flattened state dict knows no groups.

        Raises ConfigError: there is no model where ``keys`` says.
        """
        self.label = f"the directory {directory}"
        self._directory, self._metadata, self._keys, self._groups = directory, metadata, keys, groups
        self._aliases: dict[str, tuple[str, ...]] = {}
        self._made: dict[str, list[str]] = {}
        self._paths = {key: (MODEL, path[0]) for key, path in self._below(MODEL) if len(path) == 1}
        if not self._paths:
            raise self._nothing("model", keys.model)

    def find_optimizer(self) -> None:
        """Know the optimizer, too.

        Raises ConfigError: there is nothing where it is said to be, or its state is by numbers.
        """
        found = self._optimizer_paths()
        if not found:
            raise self._nothing("optimizer", self._keys.optimizer)
        self._paths.update(found)

    def read(self, targets: dict[str, Any]) -> None:
        wanted = {key: target for key, target in targets.items() if key not in self._made}
        # Settings of a flattened state dict are there once a parameter, and one group's must agree.
        beside = {
            other: torch.empty_like(targets[key]) if isinstance(targets[key], torch.Tensor) else None
            for key in wanted
            for other in self._aliases.get(key, ())
        }
        both = {**beside, **wanted}
        read_state(self._directory, both, self._metadata)
        targets.update({key: both[key] for key in wanted})
        targets.update({key: names for key, names in self._made.items() if key in targets})
        for key in wanted:
            for other in self._aliases.get(key, ()):
                if not same_values(both[key], both[other]):
                    raise ConfigError(
                        f"{opening(self)} has {both[key]} as '{key}' but "
                        f"{both[other]} as '{other}', and the optimizer has both parameters in one group. Make its "
                        "groups as they were when it was saved."
                    )

    def entry(self, key: str) -> Entry | None:
        found = self._metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            return None
        boxes = [Box(tuple(each.offsets), tuple(each.sizes)) for each in found.chunks]
        return Entry(tuple(found.size), found.properties.dtype, boxes)

    def _below(self, what: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        start = self._keys.path(what)
        for key, whole in (self._metadata.planner_data or {}).items():
            path = tuple(whole)
            if path[: len(start)] == start and key in self._metadata.state_dict_metadata:
                yield key, path[len(start) :]

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
        left = set(settings).difference(*self._groups)
        for index, names in enumerate(self._groups):
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
        top = sorted({str(path[0]) for path in (self._metadata.planner_data or {}).values()})
        return ConfigError(
            f"{opening(self)} has no {what} at {given!r}; at the top it has "
            f"{listed(top)}. Say where it is: DcpKeys({what}=...)."
        )


def read_state(directory: Path, targets: dict[str, Any], metadata: Metadata) -> None:
    """Fill tensors of ``targets`` in place and replace other values, by key of the checkpoint; each rank by itself."""
    reader = FileSystemReader(directory)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    plan = reader.prepare_global_plan(plans)[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
