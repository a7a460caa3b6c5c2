"""State as DTensors, where each rank holds the rows that ``Shard(0)`` would give it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ..api import as_dtensor, placement
from ..errors import UnsupportedError
from .places import Holding, Place

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def parameters_as_dtensors(places: Iterable[Place]) -> dict[str, DTensor]:
    """The parameters that can be, by name. Every rank calls it, in the same order."""
    found: dict[str, DTensor] = {}
    for place in places:
        try:
            found[place.name] = as_dtensor(place.parameter)
        except UnsupportedError:
            continue
    return found


def state_like(parameter: DTensor, holding: Holding, value: object) -> DTensor | None:
    """The optimizer's state ``value`` of a parameter that ``parameter`` shows, in the same form; None where it cannot.

    Ranks without an element of a parameter have no state of it, and a DTensor must be there on every rank.
    """
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape != holding.parameter.shape:
        return None
    if any(stop == start for start, stop in placement(holding.parameter).pieces):
        return None
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.detach(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
