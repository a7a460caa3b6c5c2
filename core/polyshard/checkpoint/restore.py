"""Matches a checkpoint with a model and an optimizer before anything is read, and takes over what was read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..engine.root import Root
from ..errors import ConfigError
from .boxes import Box
from .sharded import CheckpointTensor
from .state import Place, model_state, parameter_names, places
from .transfer import read_state

MODEL, OPTIMIZER = "model", "optimizer"
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's directory and what it says it holds."""

    directory: Path
    metadata: Metadata
    complete: bool
    """Whether every rank's part is there; not so where one rank of a pretended world saved."""

    def read(self, targets: dict[str, Any]) -> None:
        """Fill tensors in place and replace other values."""
        read_state(self.directory, targets, self.metadata)

    def entry(self, key: str) -> Any | None:
        """What is said about ``key``, or None where the checkpoint has none."""
        return self.metadata.state_dict_metadata.get(key)

    def paths(self, *prefix: str) -> dict[str, tuple[Any, ...]]:
        """Each key under ``prefix`` and the path of the value within the saved state."""
        return {
            key: tuple(path)
            for key, path in self.metadata.planner_data.items()
            # Paths name a parameter of which nobody wrote anything, too: one rank of a pretended world may hold none.
            if tuple(path)[: len(prefix)] == prefix and key in self.metadata.state_dict_metadata
        }


def model_targets(source: Source, model: nn.Module, rank: int) -> dict[str, Any]:
    """Where the model's values are to be read into, by key of the checkpoint.

    Raises:
        ConfigError: the checkpoint lacks a parameter or buffer, has one more, or has one of another shape.
    """
    targets = {f"{MODEL}.{name}": (name, value) for name, value in model_state(model).items()}
    saved = source.paths(MODEL)
    where = f"(rank {rank})"
    missing = [
        name
        for key, (name, value) in targets.items()
        if key not in saved and (source.complete or not _wants_nothing(value))
    ]
    if missing:
        raise ConfigError(
            f"The checkpoint {source.directory} has no {_listed(missing)} {where}. Load it into the model that it was "
            "saved from."
        )
    unexpected = [".".join(map(str, path[1:])) for key, path in saved.items() if key not in targets]
    if unexpected:
        raise ConfigError(
            f"The checkpoint {source.directory} has {_listed(unexpected)}, which the model lacks {where}. Load it into "
            "the model that it was saved from."
        )
    for key, (name, value) in targets.items():
        if key in saved:
            _check(source, key, f"'{name}'", value, where)
    return {key: value for key, (_, value) in targets.items() if key in saved}


class OptimizerRestore:
    """An optimizer's state on its way out of a checkpoint.

    Made before anything is read; ``targets`` are to be filled; ``commit`` then hands them to the optimizer, which is
    as it was until then, but for state tensors that it had already and that are read into in place.
    """

    def __init__(self, source: Source, root: Root, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError where the checkpoint's optimizer does not fit ``optimizer``."""
        self._optimizer = optimizer
        self._rank = root.rank
        self._source = source
        names = parameter_names(root, optimizer)
        self._settings = self._read_settings()
        self._compare_groups(names)
        self.targets: dict[str, Any] = {}
        self._entries: list[tuple[nn.Parameter, str, str]] = []
        cut = {id(place.parameter): place for place in places(root)}
        saved: dict[str, list[tuple[str, str]]] = {}
        for key, path in source.paths(OPTIMIZER, "state").items():
            saved.setdefault(path[2], []).append((path[3], key))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name, key in saved.get(names[parameter], []):
                    self.targets[key] = self._target(key, name, names[parameter], parameter, cut, group)
                    self._entries.append((parameter, name, key))
        self._tensors = {key: value for key, value in self.targets.items() if isinstance(value, _Local)}
        for key, held in self._tensors.items():
            self.targets[key] = held.target

    def commit(self) -> None:
        """Give the optimizer what was read into ``targets``."""
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for parameter, name, key in self._entries:
            value = self._tensors[key].local if key in self._tensors else self.targets[key]
            state.setdefault(parameter, {})[name] = value
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)
                if parameter in state:
                    self._optimizer.state[parameter] = state[parameter]
            for name, value in settings.items():
                current = group.get(name)
                if name == "params":
                    continue
                if isinstance(current, torch.Tensor):
                    # In place: a captured step reads the learning rate at this address.
                    current.copy_(torch.as_tensor(value))
                else:
                    group[name] = value

    def _read_settings(self) -> list[dict[str, Any]]:
        paths = self._source.paths(OPTIMIZER, "param_groups")
        if not paths:
            raise ConfigError(
                f"The checkpoint {self._source.directory} holds no optimizer (rank {self._rank}). Load it without one, "
                "or choose one that was saved with its optimizer."
            )
        values: dict[str, Any] = {}
        for key in paths:
            entry = self._source.entry(key)
            values[key] = None
            if isinstance(entry, TensorStorageMetadata):
                values[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        self._source.read(values)
        settings: list[dict[str, Any]] = [{} for _ in range(1 + max(path[2] for path in paths.values()))]
        for key, path in paths.items():
            settings[path[2]][path[3]] = values[key]
        return settings

    def _compare_groups(self, names: Mapping[nn.Parameter, str]) -> None:
        groups = self._optimizer.param_groups
        where = f"(rank {self._rank})"
        if len(groups) != len(self._settings):
            raise ConfigError(
                f"The checkpoint {self._source.directory} has {len(self._settings)} parameter groups, the optimizer "
                f"{len(groups)} {where}. Make the optimizer as it was when the checkpoint was saved."
            )
        for index, (group, settings) in enumerate(zip(groups, self._settings, strict=True)):
            different = sorted({names[parameter] for parameter in group["params"]} ^ set(settings["params"]))
            if different:
                raise ConfigError(
                    f"Group {index} of the optimizer and of the checkpoint {self._source.directory} differ in "
                    f"{_listed(different)} {where}. Make the optimizer as it was when the checkpoint was saved."
                )

    def _target(
        self,
        key: str,
        name: str,
        parameter_name: str,
        parameter: nn.Parameter,
        cut: Mapping[int, Place],
        group: Mapping[str, Any],
    ) -> _Local | None:
        entry = self._source.entry(key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        what = f"optimizer state '{name}' of '{parameter_name}'"
        present = self._optimizer.state.get(parameter, {}).get(name)
        place = cut.get(id(parameter))
        dtype = entry.properties.dtype
        if place is not None and len(entry.size) and tuple(entry.size) == place.slot.shape:
            local = present if _fits(present, parameter.shape, dtype) else torch.zeros_like(parameter, dtype=dtype)
            target: torch.Tensor = place.shaped(local)
        else:
            # As torch's optimizers place them: beside the parameter only where a kernel reads them there.
            on_device = bool(len(entry.size)) or bool(group.get("capturable")) or bool(group.get("fused"))
            device = parameter.device if on_device else torch.device("cpu")
            local = (
                present if _fits(present, entry.size, dtype) else torch.zeros(entry.size, dtype=dtype, device=device)
            )
            target = local
        _check(self._source, key, what, target, f"(rank {self._rank})")
        return _Local(local.detach(), target)


@dataclass(frozen=True, slots=True, eq=False)
class _Local:
    """A state tensor, and what the checkpoint is read into."""

    local: torch.Tensor
    target: torch.Tensor


def _fits(present: Any, shape: Iterable[int], dtype: torch.dtype) -> bool:
    return isinstance(present, torch.Tensor) and tuple(present.shape) == tuple(shape) and present.dtype == dtype


def _wants_nothing(value: Any) -> bool:
    return isinstance(value, CheckpointTensor) and not value.chunks


def _check(source: Source, key: str, what: str, target: Any, where: str) -> None:
    """Raise ConfigError unless all of ``target`` can be read from the checkpoint."""
    entry = source.entry(key)
    if not isinstance(entry, TensorStorageMetadata):
        raise ConfigError(
            f"{what} is no tensor in the checkpoint {source.directory} {where}. Load it into the model that it was "
            "saved from."
        )
    if tuple(entry.size) != tuple(target.shape):
        raise ConfigError(
            f"{what} has shape {tuple(entry.size)} in the checkpoint {source.directory} but {tuple(target.shape)} in "
            f"the model {where}. Load it into the model that it was saved from."
        )
    if sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size):
        return
    wanted = (
        [chunk.box for chunk in target.chunks]
        if isinstance(target, CheckpointTensor)
        else [Box((0,) * target.ndim, tuple(target.shape))]
    )
    for box in wanted:
        held = sum(_overlap(box, chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        if held != box.numel:
            raise ConfigError(
                f"The checkpoint {source.directory} holds {held} of the {box.numel} elements of {what} from "
                f"{list(box.offsets)} on {where}: one rank of a pretended world saved it. Load it on the same rank of "
                "the same world size."
            )


def _overlap(box: Box, offsets: Iterable[int], sizes: Iterable[int]) -> int:
    return math.prod(
        max(0, min(low + size, start + extent) - max(low, start))
        for low, size, start, extent in zip(box.offsets, box.sizes, offsets, sizes, strict=True)
    )


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown
