"""Checkpoints into a model and its optimizer: those that ``save`` wrote, and those of other writers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError, PolyshardError, RankMismatchError, StateError
from ..interfaces import Collectives
from ..runtime.root import Root
from ..state.agreement import Answers, require_seen, tell_listeners, together
from ..state.exchange import coordinates
from ..state.kind import Kind
from ..state.optimizers import Joint, Optimizers
from ..state.places import holdings
from ..state.resting import resting_root
from ..state.restore import ModelRestore, OptimizerRestore
from ..state.source import Source
from . import pickled as old
from .arguments import joint_of, path_of, told
from .casters import restore_casters
from .folder import Line
from .foreign import DcpKeys, ForeignSource
from .history import History
from .marker import MARKER, Marker
from .stored import StoredSource

#: What ``torch.distributed.checkpoint`` describes a directory in.
_METADATA = ".metadata"


def load(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    frozen: bool = True,
    pickles: bool = False,
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
        pickles: Whether to read formats 1 and 2, too. They are made of pickles, which can execute anything: only where
            you trust whoever could write there. Optimizer state that format 1 let stand still is repaired, with a
            warning, where it can be known.

    Raises:
        StateError: the directory is not committed; inside a step; ``model`` is not the outermost sharded module.
        CheckpointDamagedError: a file is gone, or holds something else than was written; where that is found while
            elements are read, the model may hold parts of the checkpoint.
        ConfigError: the checkpoint is of another model or optimizer, or of format 1 or 2 without ``pickles``; nothing
            was changed.
        RankMismatchError: another rank failed, or was given another checkpoint.
        OSError: reading failed; the model may hold parts of the checkpoint.
        BackgroundSaveError: the save in the background failed, on any rank, which nobody was told of yet; on all ranks
            alike. Nothing was changed.
        Exception: a listener's, on its rank, once everything is loaded.
    """
    owner = resting_root(model, "checkpoint.load()")
    with owner.meeting("load of a checkpoint", (owner.collectives,)):
        extra = _load(owner, directory, model, optimizer, pickles=pickles, frozen=frozen)
        _tell(owner, model, directory)
    return extra


def _load(
    owner: Root, directory: Path, model: nn.Module, optimizer: Optimizers | None, *, pickles: bool, frozen: bool
) -> Mapping[str, Any]:
    collectives, history = owner.collectives, History.of(owner)
    history.settle(owner)
    called: dict[str, object] = {}
    _require_seen(collectives, directory, MARKER)
    with together(collectives, f"Opening the checkpoint {directory}", called):
        directory = path_of(directory, "directory")
        joint = joint_of(optimizer)
        called.update(optimizer=told(joint), frozen=frozen, pickles=pickles)
        marker = Marker.read(directory)
        if not pickles:
            require_no_pickles(directory, marker)
        if coordinates(collectives):
            marker.require_files(directory)
        with _readable(directory, collectives):
            content = _Content.of_pickles(directory, marker) if marker.pickled else _Content.of(directory, marker)
    _require_same(directory, marker.identity, collectives)
    with together(collectives, f"Matching the checkpoint {directory}"), _readable(directory, collectives):
        targets = ModelRestore(content.source, model, collectives.rank, frozen=frozen).targets
        restore = None
        if joint is not None:
            restore = OptimizerRestore(content.source, owner, joint, content.kind)
    with together(collectives, f"Reading the checkpoint {directory}"), _readable(directory, collectives):
        if restore is None:
            content.source.read(targets)
        else:
            # At once: a file's blocks have something of both.
            both = {**targets, **restore.targets}
            content.source.read(both)
            restore.targets.update({key: both[key] for key in restore.targets})
            restore.commit()
        restore_casters(owner, content.precision)
        if coordinates(collectives):
            history.line = Line.from_loaded(directory, marker)
    return content.extra


def require_no_pickles(directory: Path, marker: Marker) -> None:
    """Refuse formats 1 and 2.

    Raises:
        ConfigError: saying what they are.
    """
    if marker.pickled:
        raise ConfigError(
            f"{directory} has format {marker.format}, which is made of pickles: to load it is to execute whatever is "
            "in there. Where you trust everybody who could write to it, call polyshard.checkpoint.load(..., "
            "pickles=True), and save it again."
        )


@dataclass(frozen=True)
class _Content:
    """What a checkpoint holds."""

    source: Source
    kind: Kind | None
    precision: Mapping[str, Mapping[str, Any]]
    extra: Mapping[str, Any]

    @classmethod
    def of(cls, directory: Path, marker: Marker) -> _Content:
        manifest = marker.read_manifest(directory)
        source = StoredSource(manifest)
        kind = None if manifest.optimizer is None else manifest.optimizer.kind
        return cls(source, kind, source.precision, source.extra)

    @classmethod
    def of_pickles(cls, directory: Path, marker: Marker) -> _Content:
        # One rank holds an element of everything.
        may_stand_still = marker.format == 1 and marker.complete and marker.world_size > 1
        source = old.PickledSource(directory, old.read_metadata(directory), marker.complete, may_stand_still)
        beside = old.Beside.read(directory)
        return cls(source, beside.optimizer, beside.precision, beside.extra)


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
    owner = resting_root(model, "checkpoint.load_dcp()")
    with owner.meeting("load of a checkpoint", (owner.collectives,)):
        _load_dcp(owner, directory, model, optimizer, keys)
        _tell(owner, model, directory)


def _load_dcp(
    owner: Root, directory: Path, model: nn.Module, optimizer: Optimizers | None, keys: DcpKeys | None
) -> None:
    collectives = owner.collectives
    called: dict[str, object] = {}
    _require_seen(collectives, directory, _METADATA)
    opening = f"Opening the directory {directory}"
    with together(collectives, opening, called), _readable(directory, collectives):
        directory = path_of(directory, "directory")
        joint = joint_of(optimizer)
        called.update(optimizer=told(joint), keys=keys)
        groups = [] if joint is None else _names(owner, joint)
        source = ForeignSource(directory, _metadata(directory), keys or DcpKeys(), groups)
        identity = hashlib.sha256((directory / _METADATA).read_bytes()).hexdigest()
    _require_same(directory, identity, collectives)
    with together(collectives, f"Matching the directory {directory}"), _readable(directory, collectives):
        targets = ModelRestore(source, model, collectives.rank).targets
        restore = None
        if joint is not None:
            source.find_optimizer()
            restore = OptimizerRestore(source, owner, joint, None)
    with together(collectives, f"Reading the directory {directory}"), _readable(directory, collectives):
        source.read(targets)
        if restore is not None:
            source.read(restore.targets)
            restore.commit()


def _metadata(directory: Path) -> Any:
    if not (directory / _METADATA).is_file():
        raise StateError(
            f"{directory} was not written by torch.distributed.checkpoint: it has no file '{_METADATA}', or its save "
            "did not end. Name the directory that was checkpoint_id of the save."
        )
    return old.read_metadata(directory)


def _names(owner: Root, joint: Joint) -> list[list[str]]:
    held = holdings(owner, joint.groups)
    return [[name for parameter in group["params"] for name in held[parameter].names] for group in joint.groups]


@contextmanager
def _readable(directory: Path, collectives: Collectives) -> Iterator[None]:
    """Name the checkpoint and the rank where torch raises what does not.

    Files of the right size may hold anything: what they then raise is torch's, pickle's and zip's.
    """
    try:
        yield
    except (PolyshardError, OSError):
        raise
    except Exception as error:
        raise StateError(
            f"{directory} is damaged: it cannot be read on rank {collectives.rank} ({type(error).__name__}: {error}). "
            "Load an older checkpoint."
        ) from error


def _require_seen(collectives: Collectives, directory: object, name: str) -> None:
    """Raise on all ranks where some see the file ``name`` in ``directory`` and others do not."""
    # Of what cannot be a directory whoever opens it tells; None is what latest() found on a rank that sees nothing.
    seen = directory is not None
    with suppress(ConfigError):
        seen = seen and os.path.lexists(path_of(directory, "directory") / name)
    require_seen(collectives, directory, seen)


def _require_same(directory: Path, identity: str, collectives: Collectives) -> None:
    """Raise RankMismatchError unless all ranks were given the same checkpoint."""
    answers = Answers(collectives, 0, str(directory), key=identity)
    if not answers.differ:
        return
    groups = answers.alike(range(collectives.world_size))
    one, other = [(ranks[0], answers.words_of(ranks[0])) for ranks in groups[:2]]
    rank, elsewhere = other if collectives.rank in groups[0] else one
    raise RankMismatchError(
        f"Ranks were given different checkpoints: {directory} on rank {collectives.rank}, {elsewhere} on rank {rank}. "
        "Let one rank ask latest() and tell the others."
    )


def _tell(owner: Root, model: nn.Module, directory: Path) -> None:
    tell_listeners(owner.collectives, f"the load of {directory}", partial(owner.events.on_load, model, Path(directory)))
