"""What a model's precision casters have to remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..interfaces import PrecisionCaster
from ..runtime.root import Root


def caster_states(owner: Root) -> dict[str, dict[str, Any]]:
    """State of each that has some, under the name of the first unit that it serves."""
    states = {name: dict(caster.state_dict()) for name, caster in _casters(owner).items()}
    return {name: state for name, state in states.items() if state}


def restore_casters(owner: Root, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the casters of the model what they had."""
    for name, caster in _casters(owner).items():
        if name in states:
            caster.load_state_dict(states[name])


def _casters(owner: Root) -> dict[str, PrecisionCaster]:
    found: dict[int, tuple[str, PrecisionCaster]] = {}
    for unit in owner.units:
        found.setdefault(id(unit.caster), (unit.name, unit.caster))
    return dict(found.values())
