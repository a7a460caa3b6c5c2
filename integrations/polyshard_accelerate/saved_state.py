"""Sharded models and their optimizers in the folder that Accelerate saves the rest into.

``polyshard_0`` is a folder of ``polyshard.checkpoint`` for the first sharded model, with the optimizers over its
parameters, and so on; ``polyshard.json`` says which checkpoints belong together. It is written last: a folder without
it is no complete one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from polyshard import checkpoint
from polyshard.checkpoint.folder import Contents
from polyshard.checkpoint.storage import storage_of
from polyshard.errors import ConfigError, StateError
from polyshard_trainers.models import held_by, parameters_of
from torch import nn

INDEX = "polyshard.json"
_FORMAT = 1
#: What ``polyshard.json`` holds: of each sharded model its class's name, the numbers of the optimizers over its
#: parameters among those over sharded models, and its checkpoint, from the folder.
Index = dict[str, Any]


class TrainingState:
    """Sharded models, in the order of ``prepare``, and the optimizers over their parameters."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models = {model: set(parameters_of(model)) for model in models}
        self._optimizers = list(optimizers)

    def parts(self) -> Iterator[tuple[nn.Module, list[torch.optim.Optimizer]]]:
        """Each model, with the optimizers that hold a parameter of it."""
        for model, own in self._models.items():
            yield model, [each for each in self._optimizers if not own.isdisjoint(held_by(each))]

    def save(self, folder: Path, step: int, *, speaks: bool) -> Index:
        """Write a checkpoint of each model; every rank calls it.

        Args:
            folder: The same on every rank, on one file system.
            step: Accelerate's count of batches, for gradient accumulation.
            speaks: Whether this rank is the main process.

        Returns:
            The index, to be written behind everything else.
        """
        written = []
        for number, (model, optimizers) in enumerate(self.parts()):
            place = folder / f"polyshard_{number}"
            # Theirs replaces files; a checkpoint stays until the next one is complete.
            before = [entry.marker.step for entry in Contents.of(place).entries] if speaks else []
            turn = broadcast_object_list([1 + max(before, default=-1)])[0]
            directory = checkpoint.save(place, turn, model, optimizers or None, extra={"step": step})
            written.append(f"{place.name}/{directory.name}")
        return {"format": _FORMAT, "models": self._names(), "optimizers": self._numbers(), "checkpoints": written}

    def load(self, folder: Path) -> int:
        """Read what ``save`` wrote; every rank calls it. Returns ``step``.

        Raises:
            StateError: ``folder`` is not complete.
            ConfigError: it is of other models or optimizers; nothing was changed, or models before the one that is
                named.
        """
        index, names, numbers = _index_in(folder), self._names(), self._numbers()
        if len(index["models"]) != len(names):
            prepared = f"{len(names)} are prepared ({', '.join(names)})" if names else "none is prepared"
            raise ConfigError(
                f"{folder} holds {len(index['models'])} sharded models ({', '.join(index['models'])}), but {prepared}. "
                "Prepare the models that were saved, in the same order; a Trainer does so when it begins to train."
            )
        if numbers != index["optimizers"]:
            raise ConfigError(
                f"{folder} was saved with optimizers {_listed(index['optimizers'])} over its models, and prepared are "
                f"{_listed(numbers)}. Prepare the optimizers that were saved, in the same order."
            )
        step = 0
        for (model, optimizers), directory in zip(self.parts(), index["checkpoints"], strict=True):
            step = checkpoint.load(folder / directory, model, optimizers or None)["step"]
        return step

    def _names(self) -> list[str]:
        return [type(model).__name__ for model in self._models]

    def _numbers(self) -> list[list[int]]:
        return [
            [number for number, each in enumerate(self._optimizers) if each in optimizers]
            for _, optimizers in self.parts()
        ]


def finish(folder: Path, index: Index) -> None:
    """Write ``index``, whole or not at all, and remove the checkpoints that it does not name; one rank calls it."""
    unfinished = folder / f".{INDEX}"
    with unfinished.open("w", encoding="utf-8") as stream:
        json.dump(index, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(folder / INDEX)
    for number, kept in enumerate(index["checkpoints"]):
        for entry in Contents.of(folder / f"polyshard_{number}").entries:
            if entry.directory != folder / kept:
                storage_of(entry.directory).discard(entry.directory)


def _index_in(folder: Path) -> Index:
    path = folder / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StateError(
            f"{folder} has no {INDEX}: it was saved by another Accelerator than polyshard's, or the save did not "
            "live to its end. Load a folder that save_state() of polyshard_accelerate.Accelerator has written."
        ) from error
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read ({error}). Load an older checkpoint.") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise StateError(f"{path} is of another format than {_FORMAT}. Load it with the polyshard that wrote it.")
    return found


def _listed(numbers: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{list(each)} over model {number}" for number, each in enumerate(numbers))
