"""Checkpoints on disk: one directory a save, valid once its marker is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.step.root import Root
from ..errors import ConfigError, PolyshardError, RankMismatchError, StateError
from ..interfaces import Collectives, PrecisionCaster
from ..state.agreement import together
from ..state.contents import model_state, optimizer_state
from ..state.exchange import coordinates, from_first, speaks
from ..state.kind import described
from ..state.optimizers import Joint, Optimizers
from ..state.places import MODEL, OPTIMIZER
from ..state.resting import resting_root
from ..state.restore import ModelRestore, OptimizerRestore
from ..state.sharded import CheckpointTensor
from .attempt import Attempt, attempt_in
from .directory import DirectorySource
from .folder import Line
from .marker import Marker
from .transfer import read_metadata, write_state

_SMALL = "extra.pt"


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write ``root/step-00000100`` for step 100, by ``torch.distributed.checkpoint``; returns that directory.

    Every rank calls it, between steps. Each rank writes its own shards, so all must see the same file system. They
    write to a directory of this save alone, which gets its name only when it is complete and the file ``COMMITTED`` is
    in it; what saves left in ``root`` that did not live to their end is removed. A run that was taken up at an earlier
    step and comes to one that is there already writes ``step-00000100.2``. On one rank of a pretended world
    (collectives that cannot communicate) the directory holds that rank's part.

    Args:
        root: Directory of all checkpoints of a run; made where missing. For one job at a time.
        step: Not negative; the checkpoint's number.
        model: The outermost sharded module.
        optimizer: Over the model's parameters; saved with its state and its groups' settings. Several, in a sequence,
            hold different parameters.
        extra: Small picklable values (data position, random states); rank 0's are kept. Buffers, too, are rank 0's.
        keep: How many checkpoints to leave of those that this one goes back to, itself included; older ones are
            removed. What ``root`` holds beside them, and links, stay. None for all.

    Raises:
        StateError: inside a step, or ``model`` is not the outermost sharded module.
        ConfigError: the step is committed already, another job saves into ``root``, or the optimizer has state that
            cannot be saved.
        RankMismatchError: another rank failed.
        CollectiveError: another rank did not come, within the configuration's ``timeout_s``.
        PolyshardError, OSError: writing failed; nothing is left of it.
    """
    owner = resting_root(model, "checkpoint.save()")
    collectives = owner.collectives
    what = f"the checkpoint of step {step} in {root}"
    attempt: Attempt | None = None
    target: Path | None = None
    with ExitStack() as stack:
        with together(collectives, f"Preparing {what}"):
            if step < 0 or (keep is not None and keep < 1):
                raise ConfigError(f"step must not be negative and keep at least 1, but they are {step} and {keep}.")
            state = _state(owner, model, optimizer)
            if coordinates(collectives):
                line = _line(owner, Path(root))
                target = Path(root) / line.target(step).name
                attempt = stack.enter_context(attempt_in(Path(root)))
                small = {
                    "extra": dict(extra or {}),
                    "precision": _caster_states(owner),
                    "optimizer": None if optimizer is None else described(Joint(optimizer)),
                }
                _write(attempt.path / _SMALL, small)
        # Names alone: one file system may be mounted at several places.
        name: str = from_first(collectives, None if attempt is None else attempt.path.name)
        written = write_state(Path(root) / name, state, collectives)
        with together(collectives, f"Committing {what}"):
            if attempt is not None and target is not None:
                marker = Marker(
                    step=step,
                    world_size=collectives.world_size,
                    complete=collectives.world_size == 1 or speaks(collectives),
                    identity=attempt.identity,
                    parent=line.newest,
                    turn=line.next_turn(),
                    files=attempt.sizes(written),
                )
                attempt.commit(target, marker)
                owner.checkpoint_line = line.after(marker)
                if keep is not None:
                    owner.checkpoint_line.prune(keep)
    directory: Path = Path(root) / from_first(collectives, None if target is None else target.name)
    owner.events.on_save(model, directory)
    return directory


def load(directory: Path, model: nn.Module, optimizer: Optimizers | None = None) -> Mapping[str, Any]:
    """Read a checkpoint that ``save`` wrote into ``model`` and ``optimizer``; returns ``extra``.

    Every rank calls it, between steps, with the optimizers that were saved, in the same order. World size and strategy
    may differ from those of the save. Parameters and buffers change in place; an optimizer that never stepped is given
    its state. Optimizer state that polyshard 0.1 let stand still is repaired, with a warning, where it can be known.
    Only read checkpoints that you trust: they contain pickles.

    Raises:
        StateError: the directory is not committed, or damaged; inside a step; ``model`` is not the outermost sharded
            module.
        ConfigError: the checkpoint is of another model or optimizer; nothing was changed.
        RankMismatchError: another rank failed, or was given another checkpoint.
        OSError: reading failed; the model may hold parts of the checkpoint.
    """
    owner = resting_root(model, "checkpoint.load()")
    collectives, directory = owner.collectives, Path(directory)
    with together(collectives, f"Opening the checkpoint {directory}"), _readable(directory, collectives):
        marker = Marker.read(directory)
        if coordinates(collectives):
            marker.require_files(directory)
        # One rank holds an element of everything.
        may_stand_still = marker.format == 1 and marker.complete and marker.world_size > 1
        source = DirectorySource(directory, read_metadata(directory), marker.complete, may_stand_still)
        small = torch.load(directory / _SMALL, map_location="cpu", weights_only=False)
    _require_same(directory, marker, collectives)
    with together(collectives, f"Matching the checkpoint {directory}"), _readable(directory, collectives):
        targets = ModelRestore(source, model, collectives.rank).targets
        restore = None
        if optimizer is not None:
            restore = OptimizerRestore(source, owner, Joint(optimizer), small.get("optimizer"))
    with together(collectives, f"Reading the checkpoint {directory}"), _readable(directory, collectives):
        source.read(targets)
        if restore is not None:
            source.read(restore.targets)
            restore.commit()
        for name, caster in _casters(owner).items():
            if name in small["precision"]:
                caster.load_state_dict(small["precision"][name])
        if coordinates(collectives):
            owner.checkpoint_line = Line.from_loaded(directory, marker)
    owner.events.on_load(model, directory)
    extra: Mapping[str, Any] = small["extra"]
    return extra


def _line(owner: Root, folder: Path) -> Line:
    line = owner.checkpoint_line
    if isinstance(line, Line) and line.folder == folder.resolve():
        return line
    return Line.begun(folder)


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


def _require_same(directory: Path, marker: Marker, collectives: Collectives) -> None:
    """Raise RankMismatchError unless all ranks were given the same checkpoint."""
    if not speaks(collectives):
        return
    everyone = collectives.all_gather_object((marker.identity, str(directory)))
    other = next((rank for rank, (identity, _) in enumerate(everyone) if identity != marker.identity), None)
    if other is not None:
        raise RankMismatchError(
            f"Ranks were given different checkpoints: {directory} on rank {collectives.rank}, {everyone[other][1]} on "
            f"rank {other}. Let one rank ask latest() and tell the others."
        )


def _state(owner: Root, model: nn.Module, optimizer: Optimizers | None) -> dict[str, Any]:
    values = model_state(model)
    if owner.rank != 0 and owner.collectives.capabilities.can_communicate:
        # Buffers may differ between ranks (running statistics); one rank's must go together.
        values = {name: value for name, value in values.items() if isinstance(value, CheckpointTensor)}
    state: dict[str, Any] = {MODEL: values}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer_state(model, optimizer)
    return state


def _casters(owner: Root) -> dict[str, PrecisionCaster]:
    """Each precision caster, under the name of the first unit that it serves."""
    found: dict[int, tuple[str, PrecisionCaster]] = {}
    for unit in owner.units:
        found.setdefault(id(unit.caster), (unit.name, unit.caster))
    return dict(found.values())


def _caster_states(owner: Root) -> dict[str, Any]:
    states = {name: dict(caster.state_dict()) for name, caster in _casters(owner).items()}
    return {name: state for name, state in states.items() if state}


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())
