"""Sharded models and their optimizers in the folder that Accelerate saves the rest into.

``polyshard_0`` is a folder of ``polyshard.checkpoint`` for the first sharded model, with the optimizers over its
parameters, and so on; ``polyshard.json`` says which checkpoints belong together. It is written last: a folder without
it is no complete one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from polyshard import checkpoint
from polyshard.checkpoint.folder import Contents
from polyshard.checkpoint.storage import storage_of
from polyshard.errors import ConfigError, StateError
from polyshard_trainers.models import parameters_of
from torch import nn

INDEX = "polyshard.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Index:
    """The content of ``polyshard.json``."""

    format: int
    models: tuple[str, ...]
    """Of each sharded model, the class's name."""
    optimizers: tuple[tuple[int, ...], ...]
    """Of each sharded model, the numbers of the optimizers over its parameters, among those over sharded models."""
    checkpoints: tuple[str, ...]
    """Of each sharded model, its checkpoint, from the folder."""

    @classmethod
    def read(cls, folder: Path) -> Index:
        """That of ``folder``. Raises StateError: there is none, or it cannot be read."""
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
        return cls(
            _FORMAT,
            tuple(found["models"]),
            tuple(tuple(numbers) for numbers in found["optimizers"]),
            tuple(found["checkpoints"]),
        )

    def write(self, folder: Path) -> None:
        """Replace that of ``folder``, whole or not at all."""
        unfinished = folder / f".{INDEX}"
        with unfinished.open("w", encoding="utf-8") as stream:
            json.dump(asdict(self), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(folder / INDEX)


class TrainingState:
    """Sharded models, in the order of ``prepare``, and the optimizers over their parameters."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models = tuple(models)
        self._parts = [[_Part(number, each, model) for number, each in enumerate(optimizers)] for model in models]
        self._parts = [[part for part in parts if part.groups] for parts in self._parts]

    def parts(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        """Each model, with each optimizer over its parameters, as far as it is of these."""
        for model, parts in zip(self._models, self._parts, strict=True):
            for part in parts:
                yield model, part.optimizer

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
        for number, (model, parts) in enumerate(zip(self._models, self._parts, strict=True)):
            place = folder / f"polyshard_{number}"
            # Theirs replaces files; a checkpoint stays until the next one is complete.
            before = [entry.marker.step for entry in Contents.of(place).entries] if speaks else []
            turn = broadcast_object_list([1 + max(before, default=-1)])[0]
            optimizers = [part.optimizer for part in parts]
            extra = {"step": step}
            directory = checkpoint.save(place, turn, model, optimizers or None, extra=extra)
            written.append(f"{place.name}/{directory.name}")
        numbers = tuple(tuple(part.number for part in parts) for parts in self._parts)
        return Index(_FORMAT, self._names(), numbers, tuple(written))

    def load(self, folder: Path) -> int:
        """Read what ``save`` wrote; every rank calls it. Returns ``step``.

        Raises:
            StateError: ``folder`` is not complete.
            ConfigError: it is of other models or optimizers; nothing was changed, or models before the one that is
                named.
        """
        index = Index.read(folder)
        if len(index.models) != len(self._models):
            prepared = f"{len(self._models)} are prepared ({', '.join(self._names())})"
            raise ConfigError(
                f"{folder} holds {len(index.models)} sharded models ({', '.join(index.models)}), but "
                f"{prepared if self._models else 'none is prepared'}. Prepare the models that were saved, in the same "
                "order; a Trainer does so when it begins to train."
            )
        numbers = tuple(tuple(part.number for part in parts) for parts in self._parts)
        if numbers != index.optimizers:
            raise ConfigError(
                f"{folder} was saved with optimizers {_listed(index.optimizers)} over its models, and prepared are "
                f"{_listed(numbers)}. Prepare the optimizers that were saved, in the same order."
            )
        step = 0
        for model, parts, directory in zip(self._models, self._parts, index.checkpoints, strict=True):
            extra: Mapping[str, Any] = checkpoint.load(
                folder / directory, model, [part.optimizer for part in parts] or None
            )
            for part in parts:
                part.give_back()
            step = extra["step"]
        return step

    def _names(self) -> tuple[str, ...]:
        return tuple(type(model).__name__ for model in self._models)


def tidy(folder: Path, index: Index) -> None:
    """Remove the checkpoints that ``index`` does not name; one rank calls it."""
    for number, kept in enumerate(index.checkpoints):
        for entry in Contents.of(folder / f"polyshard_{number}").entries:
            if entry.directory != folder / kept:
                storage_of(entry.directory).discard(entry.directory)


class _Part:
    """The part of an optimizer that is one model's: the optimizer itself, where it has no other parameters."""

    def __init__(self, number: int, whole: torch.optim.Optimizer, model: nn.Module) -> None:
        self.number = number
        own = set(parameters_of(model))
        self._whole = whole
        #: Each group of the optimizer that has parameters of the model, and which of them.
        self.groups = [
            (group, chosen)
            for group in whole.param_groups
            if (chosen := [place for place, parameter in enumerate(group["params"]) if parameter in own])
        ]
        self.optimizer = whole
        taken = sum(len(chosen) for _, chosen in self.groups)
        if 0 < taken < sum(len(group["params"]) for group in whole.param_groups):
            # Shares the state, which is kept by parameter, and so is read and written in the optimizer itself.
            self.optimizer = copy.copy(whole)
            self.optimizer.param_groups = [
                {
                    name: [value[place] for place in chosen] if name in ("params", "param_names") else value
                    for name, value in group.items()
                }
                for group, chosen in self.groups
            ]
            self.optimizer.state = whole.state

    def give_back(self) -> None:
        """Let the optimizer have the settings that were loaded."""
        if self.optimizer is self._whole:
            return
        for (group, _), loaded in zip(self.groups, self.optimizer.param_groups, strict=True):
            group.update((name, value) for name, value in loaded.items() if name not in ("params", "param_names"))


def _listed(numbers: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{list(each)} over model {number}" for number, each in enumerate(numbers))
