"""Matches a source with a model and an optimizer before anything is read, and takes over what was read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import ConfigError
from ..functions.optimizers import NOT_BY_ELEMENT
from ..runtime.root import Root
from .contents import frozen_names, model_state, names_of
from .flat_state import FlatState
from .kind import IMPLEMENTATION, Kind, require_same_kinds
from .optimizers import Joint
from .places import MODEL, OPTIMIZER, Holding, holdings
from .sharded import CheckpointTensor
from .source import SavedState, Source, listed, opening, problem_with
from .state_tensors import fits, kept_beside, require_dtype

#: Lines of one error.
_MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Names of a model and of a state dict that the other one lacks."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class ModelRestore:
    """A model's values on their way out of a source. Made before anything is read; ``targets`` are to be filled."""

    def __init__(
        self, source: Source, model: nn.Module, rank: int, *, strict: bool = True, frozen: bool = True
    ) -> None:
        """Match ``model`` with the source's.

        A tied parameter is taken from any of its names.

        Args:
            source: What is to be loaded.
            model: The outermost sharded module.
            rank: For errors.
            strict: Whether all names must be in both.
            frozen: Whether parameters that need no gradient must be in the source.

        Raises:
            ConfigError: the source lacks parameters or buffers, has more, or has some of another shape or dtype: all
                that is wrong.
        """
        wanted = model_state(model)
        saved = {".".join(map(str, path[1:])): key for key, path in source.paths(MODEL).items()}
        names = names_of(model)
        needing_none = frozen_names(model)
        optional = set() if frozen else needing_none
        where = f"(rank {rank})"
        remedy = "Load it into the model that it was saved from."
        self.targets: dict[str, Any] = {}
        missing: list[str] = []
        wrong: list[str] = []
        for name, value in wanted.items():
            key = next((saved[each] for each in names.get(name, (name,)) if each in saved), None)
            if key is not None:
                self.targets[key] = value
                problem = problem_with(source, key, f"'{name}'", value, where)
                wrong += [] if problem is None else [problem]
            elif name not in optional and (source.complete or not _wants_nothing(value)):
                missing.append(name)
        known = {each for name in wanted for each in names.get(name, (name,))}
        unexpected = [name for name in saved if name not in known]
        if unexpected and strict:
            wrong.insert(0, f"{opening(source)} has {listed(unexpected)}, which the model lacks {where}. {remedy}")
        if missing and strict:
            if needing_none.issuperset(missing):
                remedy = (
                    "They need no gradient: if they were left out on purpose, let the model have their values, and "
                    "load with frozen=False."
                )
            wrong.insert(0, f"{opening(source)} has no {listed(missing)} {where}. {remedy}")
        if wrong:
            more = len(wrong) - _MOST_PROBLEMS
            raise ConfigError("\n".join([*wrong[:_MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]))
        self.unmatched = Unmatched(tuple(missing), tuple(unexpected))


class OptimizerRestore:
    """An optimizer's state on its way out of a source.

    Made before anything is read; ``targets`` are to be filled; ``commit`` then hands them to the optimizer, which is
    as it was until then, but for state tensors that it had already and that are read into in place.
    """

    def __init__(self, source: Source, root: Root, optimizer: Joint, kind: Kind | None) -> None:
        """Match ``optimizer`` with the source's, of which ``kind`` tells the class, or None where it does not.

        Raises:
            ConfigError: they do not fit.
        """
        self._optimizer = optimizer
        self._rank = root.rank
        self._source = source
        held = holdings(root, optimizer.groups)
        self._settings = self._read_settings()
        self._compare_groups(held)
        require_same_kinds(kind, self._settings, optimizer, source, root.rank)
        self.targets: dict[str, Any] = {}
        self._entries: list[tuple[nn.Parameter, str, str]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._flat: dict[nn.Parameter, FlatState] = {}
        #: Whose state is the source's afterwards. Of a parameter without elements here an optimizer may keep what
        #: it began with.
        self._taken: list[nn.Parameter] = []
        saved = self._saved(root, held)
        self._numbers = self._names_of_numbers(held.values(), saved)
        wrong: list[str] = []
        for group in optimizer.groups:
            for parameter in group["params"]:
                holding, present = held[parameter], optimizer.state_of(parameter)
                if holding.unit is not None:
                    flat = FlatState(
                        source,
                        holding,
                        saved,
                        present,
                        numbers=self._numbers,
                        beside=kept_beside(group),
                        rank=root.rank,
                    )
                    self._flat[parameter] = flat
                    self._taken.append(parameter)
                    self.targets.update(flat.targets)
                    continue
                if not holding.here:
                    continue
                self._taken.append(parameter)
                for name, key in saved.get(holding.names[0], {}).items():
                    try:
                        self.targets[key] = self._target(key, name, holding, present, group)
                    except ConfigError as error:
                        wrong.append(str(error))
                    self._entries.append((parameter, name, key))
        if wrong:
            raise ConfigError("\n".join(wrong[:_MOST_PROBLEMS]))
        self._read_scalars()

    def commit(self) -> None:
        """Give the optimizer what was read into ``targets``."""
        state = {parameter: flat.finish() for parameter, flat in self._flat.items()}
        given: set[str] = set()
        for parameter, name, key in self._entries:
            value = self._tensors[key] if key in self._tensors else self.targets[key]
            # State that was repaired is read once for several, each of which counts on by itself.
            if key in given and isinstance(value, torch.Tensor):
                value = value.clone()
            given.add(key)
            state.setdefault(parameter, {})[name] = value
        for parameter in self._taken:
            self._optimizer.replace_state(parameter, state.get(parameter))
        for group, settings in zip(self._optimizer.groups, self._settings, strict=True):
            for name, value in settings.items():
                current = group.get(name)
                if name in ("params", "param_names") or name in IMPLEMENTATION:
                    continue
                if isinstance(current, torch.Tensor):
                    # In place: a captured step reads the learning rate at this address.
                    current.copy_(torch.as_tensor(value))
                else:
                    group[name] = value

    def _saved(self, root: Root, held: Mapping[nn.Parameter, Holding]) -> SavedState:
        """By parameter name and name of the state, the source's key."""
        found: dict[str, dict[str, str]] = {}
        for key, path in self._source.paths(OPTIMIZER, "state").items():
            found.setdefault(path[2], {})[path[3]] = key
        groups = [[held[parameter] for parameter in group["params"]] for group in self._optimizer.groups]
        return self._source.mended(found, groups, root.units, self._rank)

    def _names_of_numbers(self, held: Iterable[Holding], saved: SavedState) -> frozenset[str]:
        """Names of states that are one number for a parameter, not one for each element: the same for a scalar one.

        Seen at the other parameters; where there are none, ``torch.optim`` is asked.
        """
        shapes = {place.name: place.slot.shape for holding in held for place in holding.places}
        numbers: set[str] = set()
        elements: set[str] = set()
        for parameter, states in saved.items():
            shape = shapes.get(parameter, ())
            for name, key in states.items() if shape else ():
                entry = self._source.entry(key)
                if isinstance(entry, TensorStorageMetadata):
                    (elements if tuple(entry.size) == shape else numbers).add(name)
        return frozenset(numbers | NOT_BY_ELEMENT) - elements

    def _read_settings(self) -> list[dict[str, Any]]:
        paths = self._source.paths(OPTIMIZER, "param_groups")
        if not paths:
            raise ConfigError(
                f"{opening(self._source)} holds no optimizer (rank {self._rank}). Load it without one, "
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

    def _compare_groups(self, held: Mapping[nn.Parameter, Holding]) -> None:
        groups = self._optimizer.groups
        where = f"(rank {self._rank})"
        if len(groups) != len(self._settings):
            raise ConfigError(
                f"{opening(self._source)} has {len(self._settings)} parameter groups, the optimizer "
                f"{len(groups)} {where}. Make the optimizer as it was when the checkpoint was saved."
            )
        for index, (group, settings) in enumerate(zip(groups, self._settings, strict=True)):
            names = {name for parameter in group["params"] for name in held[parameter].names}
            different = sorted(names ^ set(settings["params"]))
            if different:
                raise ConfigError(
                    f"Group {index} of the optimizer and of {self._source.described} differ in "
                    f"{listed(different)} {where}. Make the optimizer as it was when the checkpoint was saved."
                )

    def _read_scalars(self) -> None:
        """Read what flat parameters have once and the source many times, and see that it agrees."""
        scalars: dict[str, Any] = {}
        for flat in self._flat.values():
            scalars.update(flat.scalars())
        if scalars:
            self._source.read(scalars)
        for flat in self._flat.values():
            flat.take_scalars(scalars)

    def _target(
        self, key: str, name: str, holding: Holding, present: Mapping[str, Any], group: Mapping[str, Any]
    ) -> torch.Tensor | None:
        entry = self._source.entry(key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        parameter, shape, dtype = holding.parameter, tuple(entry.size), entry.properties.dtype
        local = present.get(name)
        what, where = f"optimizer state '{name}' of {holding.described}", f"(rank {self._rank})"
        require_dtype(local, dtype, what, self._source, where)
        if holding.places and shape == holding.places[0].slot.shape and (shape or name not in self._numbers):
            if not fits(local, parameter.shape, dtype):
                local = torch.zeros_like(parameter, dtype=dtype)
            target: torch.Tensor = holding.places[0].shaped(local)
        elif holding.partial and math.prod(shape) != 1:
            raise ConfigError(
                f"{what} has shape {shape} in {self._source.described}, neither a scalar nor the "
                f"parameter's shape {holding.places[0].slot.shape}, so there is no part of it for this rank {where}. "
                "Load it with the strategy that saved it, or without its optimizer."
            )
        else:
            if not fits(local, shape, dtype):
                device = parameter.device if shape or kept_beside(group) else torch.device("cpu")
                local = torch.zeros(shape, dtype=dtype, device=device)
            target = local
        wrong = problem_with(self._source, key, what, target, where)
        if wrong is not None:
            raise ConfigError(wrong)
        self._tensors[key] = local.detach()
        return target


def _wants_nothing(value: Any) -> bool:
    return isinstance(value, CheckpointTensor) and not value.chunks
