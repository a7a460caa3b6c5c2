"""Optimizer state of format 1, of which a part may have stood still while the rest was trained.

[Note: what format 1 damaged]
A load gave what is not per element (``step``, and whatever follows from it) to every rank, also to those without an
element of the parameter. There it never changed again, and the next save wrote one rank's copy of each such value,
whichever rank the planner chose. The file in which a value lies tells that rank, and those of the parameter's elements
the ranks that trained it. A number of steps can be too small, never too large; one that a rank with elements wrote is
too small where that rank itself had been given a wrong one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import ConfigError
from ..runtime.unit import Unit
from ..state.places import Holding
from ..state.source import SavedState, Source, listed, opening

_STEP = "step"


def repaired(
    source: Source,
    files: Mapping[str, set[str]],
    saved: SavedState,
    groups: Sequence[Sequence[Holding]],
    units: Iterable[Unit],
    rank: int,
) -> SavedState:
    """``saved`` with the keys of values that stood still replaced by those of a parameter beside it.

    All parameters of a group and unit step together, so that the highest number of steps is that of all. Other values
    are taken from parameters that made all steps, where these agree.

    Args:
        source: A checkpoint of format 1.
        files: In which of its files each key has values.
        saved: What it says that it has.
        groups: What each of the optimizer's groups holds.
        units: Of the model.
        rank: For errors; the first warns.

    Raises:
        ConfigError: it cannot be known what a value was.
    """
    repair = _Repair(source, files, saved, rank)
    unit_of = _units_of((holding for holdings in groups for holding in holdings), units)
    for holdings in groups:
        names = [name for holding in holdings for name in holding.names if name in unit_of and name in saved]
        steps = [repair.step(name) for name in names if _STEP in saved[name]]
        for unit in dict.fromkeys(unit_of[name] for name in names):
            repair.unit(unit, [name for name in names if unit_of[name] == unit], max(steps, default=0.0))
    repair.warn()
    return repair.found


def _units_of(holdings: Iterable[Holding], units: Iterable[Unit]) -> dict[str, str]:
    """The name of each held parameter's unit."""
    known = {parameter.names[0]: unit.name for unit in units for parameter in unit.parameters}
    return {name: known[name] for holding in holdings for name in holding.names if name in known}


class _Repair:
    def __init__(self, source: Source, files: Mapping[str, set[str]], saved: SavedState, rank: int) -> None:
        self._source = source
        self._saved = saved
        self._rank = rank
        self.found: dict[str, dict[str, str]] = {name: dict(states) for name, states in saved.items()}
        self._mended: dict[str, None] = {}
        self._files = files
        values: dict[str, Any] = {}
        for states in saved.values():
            for key in states.values():
                entry = source.entry(key)
                if not isinstance(entry, TensorStorageMetadata):
                    values[key] = None
                elif math.prod(entry.size) == 1:
                    values[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        source.read(values)
        self._values = {key: float(value) for key, value in values.items() if _is_number(value)}

    def step(self, name: str) -> float:
        """How many steps the checkpoint gives the parameter ``name``."""
        return self._values.get(self._saved[name].get(_STEP, ""), 0.0)

    def unit(self, unit: str, members: Sequence[str], most: float) -> None:
        """Mend the parameters ``members`` of one group and unit. ``most``: the steps of the group."""
        for value in dict.fromkeys(key for name in members for key in self._saved[name]):
            keys = {name: self._saved[name][value] for name in members if value in self._saved[name]}
            keys = {name: key for name, key in keys.items() if key in self._values}
            if value == _STEP:
                good = [name for name in keys if self.step(name) == most]
                suspect = [name for name in keys if self.step(name) != most]
            else:
                good = [name for name in keys if self._is_sound(name, value, most)]
                suspect = [name for name in keys if name not in good]
            agreed = {self._values[keys[name]] for name in good}
            suspect = [name for name in suspect if agreed != {self._values[keys[name]]}]
            if not suspect or (len(self._distinct(keys)) == 1 and value != _STEP):
                continue
            if len(agreed) != 1:
                raise ConfigError(
                    f"{opening(self._source)} was written by polyshard 0.1, which could let optimizer "
                    f"state '{value}' stand still: in unit '{unit}' ({listed(list(keys))}) it is "
                    f"{' or '.join(f'{each:g}' for each in self._distinct(keys))}, parameters elsewhere made {most:g} "
                    f"steps, and it cannot be known which is right (rank {self._rank}). Load it without its optimizer, "
                    "or an older checkpoint."
                )
            for name in suspect:
                self.found[name][value] = keys[good[0]]
                self._mended[name] = None

    def warn(self) -> None:
        """Tell, once, what was mended."""
        if self._mended and self._rank == 0:
            warnings.warn(
                f"{opening(self._source)} was written by polyshard 0.1, which let '{_STEP}' and what "
                f"follows from it stand still for {len(self._mended)} parameters, {listed(list(self._mended))}. They "
                "are taken to have made the steps of the parameters beside them.",
                stacklevel=2,
            )

    def _distinct(self, keys: Mapping[str, str]) -> list[float]:
        return sorted({self._values[key] for key in keys.values()})

    def _is_sound(self, name: str, value: str, most: float) -> bool:
        """Whether a rank that trained the parameter wrote ``value`` of it, and had not been given too few steps."""
        states = self._saved[name]
        step = states.get(_STEP)
        given_too_few = step is not None and self.step(name) != most and self._by_trainer(name, step)
        return self._by_trainer(name, states[value]) and not given_too_few

    def _by_trainer(self, name: str, key: str) -> bool:
        elements = [f"model.{name}", *(each for each in self._saved[name].values() if each not in self._values)]
        trainers = set().union(*(self._files.get(each, set()) for each in elements))
        return not trainers.isdisjoint(self._files.get(key, set()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not (
        isinstance(value, torch.Tensor) and value.is_complex()
    )
