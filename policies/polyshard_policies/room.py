"""How much memory gathered units may take, and how much they would."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from polyshard.errors import ConfigError
from polyshard.interfaces import bytes_of
from torch import nn

from .homes import Homes

#: One unit ahead of the one that computes, as the engine has it by default.
_PREFETCH = 1
#: How many units around the one that computes, the outermost module's among them, room is made for.
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for one unit, or for all that are gathered at once."""

    unit_nbytes: int | None
    gather_nbytes: int | None
    prefetch: int = _PREFETCH
    """Units that are gathered ahead of the one that computes."""

    def sizes(self) -> tuple[int, ...]:
        """What one unit may take, the largest first: the first with which everything fits is the one to take.

        One computes, others are ahead; what each of them lies in is gathered, too, the outermost module's own unit
        always. How much that is shows when the model is divided.
        """
        if self.gather_nbytes is None:
            assert self.unit_nbytes is not None
            return (self.unit_nbytes,)
        return tuple(self.gather_nbytes // (1 + self.prefetch + around) for around in range(_DEEPEST + 1))

    def fits(self, homes: Homes, units: Mapping[nn.Module, Collection[nn.Parameter]]) -> bool:
        """Whether ``units``, each with its parameters, are gathered in the memory there is."""
        return self.gather_nbytes is None or self.at_once(homes, units) <= self.gather_nbytes

    def at_once(self, homes: Homes, units: Mapping[nn.Module, Collection[nn.Parameter]]) -> int:
        """Bytes that are gathered at once, at the most: a unit, those around it, and those ahead."""
        nbytes = {module: homes.total(own) for module, own in units.items()}
        deepest = nbytes[homes.root]
        for module, own in units.items():
            if own and module is not homes.root:
                around = [each for each in homes.chains[next(iter(own))] if each in nbytes]
                deepest = max(deepest, sum(nbytes[each] for each in around))
        inner = sorted((size for module, size in nbytes.items() if module is not homes.root), reverse=True)
        return deepest + sum(inner[: self.prefetch])


def room_of(unit_bytes: object, gather_bytes: object, prefetch: int | None, where: str) -> Room:
    """What the options of ``where`` say. Raises ``ConfigError`` for values that they cannot take."""
    if (unit_bytes is None) == (gather_bytes is None):
        raise ConfigError(
            f"{where} takes one of unit_bytes and gather_bytes. Give unit_bytes = '256 MiB', what one unit may take "
            "while it is gathered, or gather_bytes = '2 GiB', what all may take at once."
        )
    if gather_bytes is None:
        if prefetch is not None:
            raise ConfigError(
                f"prefetch of {where} is {prefetch!r}, which changes nothing beside unit_bytes. Leave it out."
            )
        return Room(_nbytes(unit_bytes, "unit_bytes", where), None)
    ahead = _PREFETCH if prefetch is None else prefetch
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ConfigError(f"prefetch of {where} is {prefetch!r}. Give a number of units, 0 or more.")
    return Room(None, _nbytes(gather_bytes, "gather_bytes", where), ahead)


def _nbytes(value: object, option: str, where: str) -> int:
    nbytes = bytes_of(value)
    if nbytes is None or nbytes <= 0:
        raise ConfigError(
            f"{option} of {where} must be bytes above 0, a number or text such as '256 MiB', not {value!r}."
        )
    return nbytes
