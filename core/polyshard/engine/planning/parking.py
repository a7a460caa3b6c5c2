"""Which units are parked: asked of each offload manager once, of all the units that it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...interfaces import OffloadManager, UnitSpec
from .answers import parked_of
from .draft import Draft


def decide_parking(drafts: Sequence[Draft], rank: int) -> tuple[Draft, ...]:
    """``drafts``, of one model in its order, with each unit marked that its manager parks.

    Raises:
        PluginContractError: a manager answered what its contract does not allow.
    """
    served: dict[int, tuple[OffloadManager, list[UnitSpec]]] = {}
    for draft in drafts:
        served.setdefault(id(draft.offload), (draft.offload, []))[1].extend(unit.spec for unit in draft.units)
    parked = {key: parked_of(manager, tuple(specs), rank) for key, (manager, specs) in served.items()}
    return tuple(_marked(draft, parked[id(draft.offload)]) for draft in drafts)


def _marked(draft: Draft, parked: frozenset[UnitSpec]) -> Draft:
    if not parked:
        return draft
    units = tuple(dataclasses.replace(unit, parked=unit.spec in parked) for unit in draft.units)
    return dataclasses.replace(draft, units=units)
