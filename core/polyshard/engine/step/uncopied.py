"""Modules inside of units refuse to be copied or pickled by themselves: the copy would hold pieces under the names of
whole parameters, and compute with these where their shapes allow it.

The stages' own modules refuse by their stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import StateError
from ..parameters.bindings import Shown
from ..planning.managed_parameter import ManagedParameter
from ..planning.plan import STAGE_ATTRIBUTE
from .unit import Unit

#: Attribute under which a module holds what refuses; a copy finds it among a module's attributes.
_ATTRIBUTE = "_polyshard_pieces"


def refuse_copies(units: Iterable[Unit]) -> None:
    """Let the modules that hold pieces of ``units`` refuse copies, where they are not whole."""
    for unit in units:
        if unit.grid.shard is None:
            continue
        for parameter in unit.parameters:
            for module, _ in parameter.sites:
                if STAGE_ATTRIBUTE not in module.__dict__:
                    module.__dict__.setdefault(_ATTRIBUTE, _Uncopied(unit, parameter))


class _Uncopied:
    """Stands in a module that holds a piece, and is copied with it."""

    def __init__(self, unit: Unit, parameter: ManagedParameter) -> None:
        self._unit = unit
        self._parameter = parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self._refuse("deep-copied")

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        self._refuse("pickled")
        return type(None), ()

    def _refuse(self, done: str) -> None:
        unit = self._unit
        unsharded = unit.step is not None and unit.step.unsharded
        if unsharded or (unit.prepared and unit.bindings.shown is Shown.VIEWS):
            # Whole, and the copy refuses nothing.
            return
        name, rank = self._parameter.names[0], unit.grid.world.rank
        raise StateError(
            f"A module that holds a piece of '{name}' cannot be {done} (rank {rank}): the copy would take the "
            "piece for the whole. Copy it before sharding, or inside of 'with polyshard.unsharded(model)'."
        )
