"""Checkpoints on disk: one directory a save, valid once its marker is there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.root import Root
from ..errors import ConfigError, StateError
from ..interfaces import Collectives, PrecisionCaster
from .agreement import together
from .restore import MODEL, OPTIMIZER, OptimizerRestore, model_targets
from .sharded import CheckpointTensor
from .source import Source
from .state import model_state, optimizer_state, resting_root
from .transfer import read_metadata, write_state

#: Written last: a directory without it is a save that did not end.
MARKER = "COMMITTED"
_FORMAT = 1
_SMALL = "extra.pt"
_DIRECTORY = re.compile(r"step-(\d{8,})")


def save(
    root: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write ``root/step-00000100`` for step 100, by ``torch.distributed.checkpoint``; returns that directory.

    Every rank calls it, between steps. Each rank writes its own shards, so all must see the same file system. The
    directory counts only once the file ``COMMITTED`` is in it, which rank 0 writes after every rank has written; what
    an interrupted save of the same step left is removed first. On one rank of a pretended world (collectives that
    cannot communicate) the directory holds that rank's part.

    Args:
        root: Directory of all checkpoints of a run; made where missing.
        step: Not negative; the checkpoint's number.
        model: The outermost sharded module.
        optimizer: Over the model's parameters; saved with its state and its groups' settings.
        extra: Small picklable values (data position, random states); rank 0's are kept. Buffers, too, are rank 0's.
        keep: How many committed checkpoints to leave in ``root``; older ones are removed. None for all.

    Raises:
        StateError: inside a step, or ``model`` is not the outermost sharded module.
        ConfigError: the step is committed already, or the optimizer has state that cannot be saved.
        RankMismatchError: another rank failed.
        PolyshardError, OSError: writing failed; the directory is left without its marker.
    """
    owner = resting_root(model, "checkpoint.save()")
    collectives = owner.collectives
    directory = Path(root) / f"step-{step:08d}"
    with together(collectives, f"Preparing the checkpoint {directory}"):
        if step < 0 or (keep is not None and keep < 1):
            raise ConfigError(f"step must not be negative and keep at least 1, but they are {step} and {keep}.")
        state = _state(owner, model, optimizer)
        if collectives.rank == 0 or not collectives.capabilities.can_communicate:
            _make_empty(directory)
            _write(directory / _SMALL, {"extra": dict(extra or {}), "precision": _caster_states(owner)})
    with together(collectives, f"Writing the checkpoint {directory}"):
        write_state(directory, state, collectives)
    with together(collectives, f"Committing the checkpoint {directory}"):
        if collectives.rank == 0 or not collectives.capabilities.can_communicate:
            _commit(directory, step, collectives)
            if keep is not None:
                # By number, but never what was just written: a run taken up again at an earlier step starts lower.
                for old in _committed(Path(root))[:-keep]:
                    if old != directory:
                        _remove(old)
    owner.events.on_save(model, directory)
    return directory


def latest(root: Path) -> Path | None:
    """The committed checkpoint of the highest step in ``root``; None where there is none."""
    found = _committed(Path(root))
    return found[-1] if found else None


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Mapping[str, Any]:
    """Read a checkpoint that ``save`` wrote into ``model`` and ``optimizer``; returns ``extra``.

    Every rank calls it, between steps. World size and strategy may differ from those of the save. Parameters and
    buffers change in place; an optimizer that never stepped is given its state. Only read checkpoints that you trust:
    they contain pickles.

    Raises:
        StateError: the directory is not committed; inside a step; ``model`` is not the outermost sharded module.
        ConfigError: the checkpoint is of another model or optimizer; nothing was changed.
        RankMismatchError: another rank failed.
        OSError: reading failed; the model may hold parts of the checkpoint.
    """
    owner = resting_root(model, "checkpoint.load()")
    collectives, directory = owner.collectives, Path(directory)
    with together(collectives, f"Opening the checkpoint {directory}"):
        marker = _marker(directory, collectives.rank)
        source = Source(directory, read_metadata(directory), bool(marker["complete"]))
        targets = model_targets(source, model, collectives.rank)
        restore = OptimizerRestore(source, owner, optimizer) if optimizer is not None else None
        small = torch.load(directory / _SMALL, map_location="cpu", weights_only=False)
    with together(collectives, f"Reading the checkpoint {directory}"):
        source.read(targets)
        if restore is not None:
            source.read(restore.targets)
            restore.commit()
        for name, caster in _casters(owner).items():
            if name in small["precision"]:
                caster.load_state_dict(small["precision"][name])
    owner.events.on_load(model, directory)
    extra: Mapping[str, Any] = small["extra"]
    return extra


def _state(owner: Root, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
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


def _make_empty(directory: Path) -> None:
    if (directory / MARKER).exists():
        raise ConfigError(
            f"The checkpoint {directory} is committed already, and overwriting it in place could mix two steps. Save "
            "another step, or remove that directory."
        )
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as stream:
        torch.save(value, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _commit(directory: Path, step: int, collectives: Collectives) -> None:
    alone = collectives.world_size > 1 and not collectives.capabilities.can_communicate
    content = {
        "format": _FORMAT,
        "step": step,
        "world_size": collectives.world_size,
        "complete": not alone,
        "torch": str(torch.__version__),
    }
    temporary = directory / f"{MARKER}.tmp"
    with temporary.open("w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(directory / MARKER)
    _sync_directory(directory)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    # Names are as durable as the directory that holds them.
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marker(directory: Path, rank: int) -> Mapping[str, Any]:
    path = directory / MARKER
    if not path.is_file():
        raise StateError(
            f"{directory} is no complete checkpoint: it has no file '{MARKER}' (rank {rank}), so its save did not end "
            "or it is another kind of directory. Load the one that polyshard.checkpoint.latest(root) names."
        )
    content: Mapping[str, Any] = json.loads(path.read_text())
    if content["format"] != _FORMAT:
        raise StateError(
            f"{directory} has format {content['format']}, but this polyshard reads format {_FORMAT} (rank {rank}). "
            "Load it with the version that wrote it."
        )
    return content


def _committed(root: Path) -> list[Path]:
    """The committed checkpoints in ``root``, oldest step first."""
    if not root.is_dir():
        return []
    found = []
    for directory in root.iterdir():
        match = _DIRECTORY.fullmatch(directory.name)
        if match and (directory / MARKER).is_file():
            found.append((int(match[1]), directory))
    return [directory for _, directory in sorted(found)]


def _remove(directory: Path) -> None:
    # The marker first: what an interruption leaves must not count as a checkpoint.
    (directory / MARKER).unlink()
    shutil.rmtree(directory)
