"""What ranks compare of a model before it changes, beside its plugins' fingerprints and checksums of its values."""

from __future__ import annotations

import dataclasses
from typing import Any

from .engine.planning.draft import Draft
from .engine.planning.managed_parameter import ManagedParameter
from .interfaces import Collectives


def kind_of(collectives: Collectives) -> list[Any]:
    """What tells ranks apart that would exchange bytes by other means, or only pretend to."""
    cls = type(collectives)
    communicates = collectives.capabilities.can_communicate
    return [f"{cls.__module__}:{cls.__qualname__}", collectives.world_size, collectives.device.type, communicates]


def rows_of(draft: Draft, overrides: list[Any]) -> list[list[Any]]:
    """What ranks compare of a stage: settings of its own, and for each unit dtypes, wire, parameters and layout."""
    gathers = "gathered in backward" if draft.reads_in_backward else "not gathered in backward"
    rows: list[list[Any]] = [[f"'{draft.stage.name or '(root)'}'", overrides, str(draft.buffer_dtype), gathers]]
    for unit, group in zip(draft.units, draft.stage.groups, strict=True):
        title = f"unit '{unit.spec.label}'"
        dtypes = [str(getattr(unit.dtypes, field.name)) for field in dataclasses.fields(unit.dtypes)]
        travels = ["bytes on the wire", unit.wire and unit.wire.nbytes_per_rank]
        rows.append([title, ["dtypes", *dtypes], travels, ["parked", unit.parked]])
        # In no order of the layout's, which is told apart by itself.
        title = f"{title}, by {draft.layout.described}"
        rows.append([title, *sorted(_parameter(parameter) for parameter in group)])
        places = [
            [parameter.names[0], slot.offset, "rows" if slot.by_rows else "elements"]
            for parameter, slot in zip(group, unit.layout.slots, strict=True)
        ]
        rows.append([title, ["slices", unit.layout.shard_numel], ["places", *places]])
    return rows


def _parameter(parameter: ManagedParameter) -> list[Any]:
    original = parameter.original
    trained = "trained" if original.requires_grad else "frozen"
    return [*parameter.names, list(original.shape), list(original.stride()), str(original.dtype), trained]
