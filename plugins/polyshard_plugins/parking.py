"""Which units leave the device: by the names of their modules, or by what the device has room for."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from polyshard.errors import ConfigError
from polyshard.interfaces import UnitSpec

#: Names that a message lists.
_LISTED = 8


class ParkingRule(ABC):
    """Chooses among the units of one model."""

    @abstractmethod
    def parked(self, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
        """Those of ``units`` that leave the device, in their order."""


@dataclass(frozen=True, slots=True)
class ByPattern(ParkingRule):
    """Units whose module's name matches one of ``patterns``, in the way of file names in a shell.

    ``*`` stands for any characters, dots too, ``?`` for one, ``[0-9]`` for one of a set; letter case counts. The
    outermost module's name is ``(root)``.
    """

    patterns: tuple[str, ...]
    where: str
    """The setting, in messages."""

    def parked(self, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
        """Raises ``ConfigError`` where a pattern matches no unit."""
        names = {unit: unit.module_name or "(root)" for unit in units}
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names.values()):
                raise ConfigError(self._unmatched(pattern, list(dict.fromkeys(names.values()))))
        return tuple(unit for unit, name in names.items() if any(fnmatchcase(name, each) for each in self.patterns))

    def _unmatched(self, pattern: str, names: list[str]) -> str:
        near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return (
            f"{self.where} has the pattern {pattern!r}, which matches no unit.{hint} Patterns are those of file names, "
            "and match whole names of units' modules, seen from the module that is sharded. There are: "
            f"{', '.join(names[:_LISTED])}{more}."
        )


@dataclass(frozen=True, slots=True)
class ByBudget(ParkingRule):
    """All units but those that ``nbytes`` of the device have room for, taken in the order of the model.

    A unit that no longer fits is parked, and a smaller one behind it may stay. One that stays takes, on each rank,

        shard_numel * itemsize * (1 + 1 + state_factor)

    bytes for its master, its gradient and the optimizer's state, in the master's dtype; a frozen one its master alone.
    """

    nbytes: int
    state_factor: float

    def parked(self, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
        left, parked = float(self.nbytes), []
        for unit in units:
            nbytes = self.resident_nbytes(unit)
            if nbytes <= left:
                left -= nbytes
            else:
                parked.append(unit)
        return tuple(parked)

    def resident_nbytes(self, unit: UnitSpec) -> float:
        """Bytes that ``unit`` takes of a rank's device between uses, if it stays there."""
        tensors = 2 + self.state_factor if unit.trained else 1
        return unit.shard_numel * unit.master_dtype.itemsize * tensors
