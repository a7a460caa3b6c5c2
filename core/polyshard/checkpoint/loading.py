"""Checkpoints into a model and its optimizer: those that ``save`` wrote, and those of other writers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..engine.step.root import Root
from ..errors import PolyshardError, RankMismatchError, StateError
from ..interfaces import Collectives
from ..state.agreement import together
from ..state.exchange import coordinates, speaks
from ..state.optimizers import Joint, Optimizers
from ..state.places import holdings
from ..state.resting import resting_root
from ..state.restore import ModelRestore, OptimizerRestore
from .beside import Beside
from .directory import DirectorySource
from .folder import Line
from .foreign import DcpKeys, ForeignSource
from .history import History
from .marker import Marker
from .transfer import read_metadata

#: What ``torch.distributed.checkpoint`` describes a directory in.
_METADATA = ".metadata"


def load(
    directory: Path, model: nn.Module, optimizer: Optimizers | None = None, *, frozen: bool = True
) -> Mapping[str, Any]:
    """Read a checkpoint that ``save`` wrote into ``model`` and ``optimizer``; returns ``extra``.

    Every rank calls it, between steps, with the optimizers that were saved, in the same order. World size and strategy
    may differ from those of the save. Parameters and buffers change in place; an optimizer that never stepped is given
    its state. Optimizer state that polyshard 0.1 let stand still is repaired, with a warning, where it can be known.
    A save that goes on in the background is waited for. Only read checkpoints that you trust: they contain pickles.

    Args:
        directory: What ``save`` or ``latest`` returned.
        model: The outermost sharded module.
        optimizer: Those that were saved; None leaves saved ones alone.
        frozen: Whether parameters that need no gradient must be in the checkpoint. Without, those that are not there
            keep their values, which are not compared with those at the save: they have to be the same.

    Raises:
        StateError: the directory is not committed, or damaged; inside a step; ``model`` is not the outermost sharded
            module.
        ConfigError: the checkpoint is of another model or optimizer; nothing was changed.
        RankMismatchError: another rank failed, or was given another checkpoint.
        OSError: reading failed; the model may hold parts of the checkpoint.
        PolyshardError: the save in the background failed, and nobody has been told yet.
    """
    owner = resting_root(model, "checkpoint.load()")
    collectives, directory = owner.collectives, Path(directory)
    history = History.of(owner)
    history.settle(owner)
    with together(collectives, f"Opening the checkpoint {directory}"), _readable(directory, collectives):
        marker = Marker.read(directory)
        if coordinates(collectives):
            marker.require_files(directory)
        # One rank holds an element of everything.
        may_stand_still = marker.format == 1 and marker.complete and marker.world_size > 1
        source = DirectorySource(directory, read_metadata(directory), marker.complete, may_stand_still)
        beside = Beside.read(directory)
    _require_same(directory, marker.identity, collectives)
    with together(collectives, f"Matching the checkpoint {directory}"), _readable(directory, collectives):
        targets = ModelRestore(source, model, collectives.rank, frozen=frozen).targets
        restore = None
        if optimizer is not None:
            restore = OptimizerRestore(source, owner, Joint(optimizer), beside.optimizer)
    with together(collectives, f"Reading the checkpoint {directory}"), _readable(directory, collectives):
        source.read(targets)
        if restore is not None:
            source.read(restore.targets)
            restore.commit()
        beside.restore_precision(owner)
        if coordinates(collectives):
            history.line = Line.from_loaded(directory, marker)
    owner.events.on_load(model, directory)
    return beside.extra


def load_dcp(
    directory: Path, model: nn.Module, optimizer: Optimizers | None = None, *, keys: DcpKeys | None = None
) -> None:
    """Read a directory that somebody wrote by ``torch.distributed.checkpoint.save``: from FSDP2, DDP or one process.

    The state dict that was saved has the forms of ``torch.distributed.checkpoint.state_dict.get_state_dict``, its
    optimizer flattened or not. Each rank reads what it holds; the number of ranks does not matter. Parameters and
    buffers change in place; an optimizer that never stepped is given its state. Of the optimizer's class such a
    directory says nothing; settings that are on or off are compared. Every rank calls it, between steps. Only read
    directories that you trust: they contain pickles.

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
    collectives, directory = owner.collectives, Path(directory)
    joint = None if optimizer is None else Joint(optimizer)
    with together(collectives, f"Opening the directory {directory}"), _readable(directory, collectives):
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
    owner.events.on_load(model, directory)


def _metadata(directory: Path) -> Any:
    if not (directory / _METADATA).is_file():
        raise StateError(
            f"{directory} was not written by torch.distributed.checkpoint: it has no file '{_METADATA}', or its save "
            "did not end. Name the directory that was checkpoint_id of the save."
        )
    return read_metadata(directory)


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


def _require_same(directory: Path, identity: str, collectives: Collectives) -> None:
    """Raise RankMismatchError unless all ranks were given the same checkpoint."""
    if not speaks(collectives):
        return
    everyone = collectives.all_gather_object((identity, str(directory)))
    other = next((rank for rank, (each, _) in enumerate(everyone) if each != identity), None)
    if other is not None:
        raise RankMismatchError(
            f"Ranks were given different checkpoints: {directory} on rank {collectives.rank}, {everyone[other][1]} on "
            f"rank {other}. Let one rank ask latest() and tell the others."
        )
