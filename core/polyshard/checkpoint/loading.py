"""Checkpoints that ``save`` wrote, into a model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..interfaces import Collectives
from ..state.contents import Optimizers, known_names
from ..state.exchange import coordinates, notify_listeners, require_same, require_seen, together
from ..state.restore import Restore
from .contents import restore_precisions
from .folder import Line
from .manifest import Manifest, Marker
from .parts import Models, Stages
from .pending import History
from .reading import StoredSource, readable
from .storage import MARKER, Place, place_of, storage_of

REMEDY = "Let one rank ask latest() and tell the others."


def load(
    directory: Place, model: nn.Module | Stages, optimizer: Optimizers | None = None, *, frozen: bool = True
) -> Mapping[str, Any]:
    """Read a checkpoint that ``save`` wrote into ``model`` and ``optimizer``; returns ``extra``.

    Every rank calls it, between steps, with the optimizers that were saved, in the same order. World size and strategy
    may differ from those of the save. Parameters and buffers change in place; an optimizer that never stepped is given
    its state. A save that goes on in the background is waited for. Nothing in the checkpoint is executed, and what a
    rank reads is compared with the digests that were taken when it was written.

    Args:
        directory: What ``save`` or ``latest`` returned.
        model: The outermost sharded module, or the ``Stages`` of a pipeline: any number of them loads what any other
            saved, or a model without any.
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
    with Models.meeting(model, "checkpoint.load()", "load of a checkpoint") as models:
        for each in models.handles:
            each.attached(History).finish_pending(each)
        return _load(models, directory, optimizer, frozen=frozen)


def _load(models: Models, directory: Place, optimizer: Optimizers | None, *, frozen: bool) -> Mapping[str, Any]:
    everyone = models.collectives
    called: dict[str, object] = {}
    require_file_seen(everyone, directory, MARKER)
    with together(everyone, f"Opening the checkpoint {directory}", called):
        directory = place_of(directory, "directory")
        parts = models.parts(optimizer)
        called.update(optimizer=str(parts[0].joint and parts[0].joint.signature), frozen=frozen)
        marker = Marker.read(directory)
        if coordinates(everyone):
            marker.require_files(directory)
            marker.require_described(directory)
        with readable(directory, everyone.rank):
            manifest = Manifest.read(directory, marker)
            source = StoredSource(manifest)
            # Decoded here, where a failure changes nothing.
            precision, extra = source.precision, source.extra
    require_same(everyone, directory, marker.identity, REMEDY)
    kind = manifest.kind
    with together(everyone, f"Matching the checkpoint {directory}"), readable(directory, everyone.rank):
        source.know({name: saved for part in parts for name, saved in known_names(part.sharded).items()})
        sources = [models.source_of(part, source) for part in parts]
        restores = [
            Restore(each, part.sharded, part.joint, kind, frozen=frozen)
            for each, part in zip(sources, parts, strict=True)
        ]
    models.refuse_left_over(source, parts)
    # What its manifest does not say is in blocks with digests: other errors are not the checkpoint's.
    with together(everyone, f"Reading the checkpoint {directory}"):
        for part, each, restore in zip(parts, sources, restores, strict=True):
            with part.sharded.reporting_progress(part.module, f"Loading {directory}"):
                # Model and optimizer at once: a file's blocks have something of both.
                each.read(restore.targets)
            restore.commit()
            restore_precisions(part.sharded, precision)
        if coordinates(everyone):
            parts[0].sharded.attached(History).line = Line.from_loaded(directory, marker)
    for part in parts:
        notify = partial(part.sharded.notify_loaded, part.module, directory)
        notify_listeners(part.sharded.collectives, f"the load of {directory}", notify)
    return extra


def require_file_seen(collectives: Collectives, directory: object, name: str) -> None:
    """Raise on all ranks where some see the file ``name`` in ``directory`` and others do not."""
    # No path at all fails when it is opened; None is what latest() found on a rank that sees nothing.
    seen = directory is not None
    with suppress(ConfigError, OSError):
        place = place_of(directory, "directory") if seen else None
        seen = place is not None and storage_of(place).sees(place / name)
    require_seen(collectives, directory, seen)
