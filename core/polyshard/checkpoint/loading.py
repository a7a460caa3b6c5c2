"""Checkpoints into a model and its optimizer: those that ``save`` wrote, and those of other writers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from ..inspect import ShardedModel, savable_model
from ..interfaces import Collectives
from ..io.boxes import Box
from ..state.contents import Joint, Optimizers, names_of
from ..state.exchange import coordinates, notify_listeners, require_same, require_seen, together
from ..state.restore import Restore
from ..state.sharded import MODEL, OPTIMIZER, holdings
from ..state.source import Entry, Source, listed, opening, require_name, same_values
from .contents import restore_casters
from .folder import Line
from .manifest import Manifest, Marker
from .pending import History
from .reading import StoredSource, readable
from .storage import MARKER, Place, place_of, storage_of

#: What ``torch.distributed.checkpoint`` describes a directory in.
_METADATA = ".metadata"
REMEDY = "Let one rank ask latest() and tell the others."


def load(
    directory: Place, model: nn.Module, optimizer: Optimizers | None = None, *, frozen: bool = True
) -> Mapping[str, Any]:
    """Read a checkpoint that ``save`` wrote into ``model`` and ``optimizer``; returns ``extra``.

    Every rank calls it, between steps, with the optimizers that were saved, in the same order. World size and strategy
    may differ from those of the save. Parameters and buffers change in place; an optimizer that never stepped is given
    its state. A save that goes on in the background is waited for. Nothing in the checkpoint is executed, and what a
    rank reads is compared with the digests that were taken when it was written.

    Args:
        directory: What ``save`` or ``latest`` returned.
        model: The outermost sharded module.
        optimizer: Those that were saved; None leaves saved ones alone.
        frozen: Whether parameters that need no gradient must be in the checkpoint. Without, those that are not there
            keep their values, which are not compared with those at the save: they have to be the same.

    Raises:
        StateError: the directory is not committed; inside a step; ``model`` is not the outermost sharded module.
        CheckpointDamagedError: a file is gone, or holds something else than was written; where that is found while
            elements are read, the model may hold parts of the checkpoint.
        ConfigError: the checkpoint is of another model or optimizer, and nothing was changed.
        RankMismatchError: another rank failed, or was given another checkpoint.
        OSError: reading failed; the model may hold parts of the checkpoint.
        BackgroundSaveError: the save in the background failed, on any rank, which was not raised yet; on all ranks
            alike. Nothing was changed.
        Exception: a listener's, on its rank, once everything is loaded.
    """
    sharded = savable_model(model, "checkpoint.load()")
    called: dict[str, object] = {}

    def parts() -> Sequence[Part]:
        joint = None if optimizer is None else Joint(optimizer)
        called.update(optimizer=str(joint and joint.signature), frozen=frozen)
        return [Part(model, sharded, joint)]

    with sharded.meeting("load of a checkpoint", (sharded.collectives,)):
        sharded.attached(History).finish_pending(sharded)
        return load_parts(sharded.collectives, directory, parts, called, frozen=frozen)


@dataclass(frozen=True)
class Part:
    """A sharded model that is saved or loaded, and its optimizer."""

    module: nn.Module
    sharded: ShardedModel
    joint: Joint | None

    @property
    def names(self) -> dict[str, str]:
        """Every name of a parameter or buffer, and the first one of the same."""
        return {name: first for first, names in names_of(self.module).items() for name in names}

    def source_in(self, source: StoredSource) -> Source:
        """What ``source`` has for this part."""
        return source


def load_parts(
    everyone: Collectives,
    directory: Place,
    parts_of: Callable[[], Sequence[Part]],
    called: Mapping[str, object],
    matched: Callable[[StoredSource, Sequence[Part]], None] = lambda source, parts: None,
    *,
    frozen: bool,
) -> Mapping[str, Any]:
    """Read a checkpoint into this rank's parts of a model; returns ``extra``. Every rank of ``everyone`` calls it.

    ``parts_of``: gives the parts, and fills ``called``, which must be equal on all ranks. ``matched``: called when all
    parts fit.
    """
    require_file_seen(everyone, directory, MARKER)
    with together(everyone, f"Opening the checkpoint {directory}", called):
        directory = place_of(directory, "directory")
        parts = parts_of()
        marker = Marker.read(directory)
        if coordinates(everyone):
            marker.require_files(directory)
        with readable(directory, everyone.rank):
            manifest = Manifest.read(directory, marker)
            source = StoredSource(manifest)
            # Decoded here, where a failure changes nothing.
            precision, extra = source.precision, source.extra
    require_same(everyone, directory, marker.identity, REMEDY)
    kind = manifest.optimizer.kind if manifest.optimizer else None
    with together(everyone, f"Matching the checkpoint {directory}"), readable(directory, everyone.rank):
        sources = [part.source_in(source) for part in parts]
        restores = [
            Restore(each, part.sharded, part.module, part.joint, kind, rank=everyone.rank, frozen=frozen)
            for each, part in zip(sources, parts, strict=True)
        ]
    matched(source, parts)
    # What its manifest does not say is in blocks with digests: other errors are not the checkpoint's.
    with together(everyone, f"Reading the checkpoint {directory}"):
        for part, each, restore in zip(parts, sources, restores, strict=True):
            with part.sharded.reporting_progress(part.module, f"Loading {directory}"):
                # Model and optimizer at once: a file's blocks have something of both.
                each.read(restore.targets)
            restore.commit()
            restore_casters(part.sharded, precision)
        if coordinates(everyone):
            parts[0].sharded.attached(History).line = Line.from_loaded(directory, marker)
    for part in parts:
        notify = partial(part.sharded.notify_loaded, part.module, directory)
        notify_listeners(part.sharded.collectives, f"the load of {directory}", notify)
    return extra


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


def require_file_seen(collectives: Collectives, directory: object, name: str) -> None:
    """Raise on all ranks where some see the file ``name`` in ``directory`` and others do not."""
    # No path at all fails when it is opened; None is what latest() found on a rank that sees nothing.
    seen = directory is not None
    with suppress(ConfigError, OSError):
        place = place_of(directory, "directory") if seen else None
        seen = place is not None and storage_of(place).sees(place / name)
    require_seen(collectives, directory, seen)


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
