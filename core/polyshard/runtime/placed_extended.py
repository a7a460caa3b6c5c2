"""Units of parameters that gather themselves (``extended.py``), whose parameters are ``DTensor`` over them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..planning.extensions import own_rows, refuse_untrainable
from ..planning.parts import is_dtensor
from .extended import ExtendedUnit, cut
from .parameters import MasterViews
from .placed import KeptUnit, PlacedParameters, PlacedUnit, Placements

_is_meta = attrgetter("is_meta")


class PlacedExtendedUnit(ExtendedUnit, PlacedUnit):
    """Parameters that gather themselves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # While names are those in the module.
        self.arguments = self.placed.extension_arguments(self.parameters[0], self.spec.master_dtype, self.dtypes)

    def _make_originals(self) -> MasterViews:
        self.views = ExtendedParameters(self)
        return self.views

    @property
    def own_tensors(self) -> Sequence[torch.Tensor]:
        assert isinstance(self.originals, ExtendedParameters)
        return self.originals.own

    @property
    def lacks_values(self) -> bool:
        return any(map(_is_meta, self.own_tensors))


class KeptExtendedUnit(KeptUnit, PlacedExtendedUnit):
    """Parameters that gather themselves, in a unit that modules see whole."""


def placed_unit(
    placed: Placements, spec: Any, layout: Any, parameters: Sequence[Any], *args: Any, **kwargs: Any
) -> PlacedUnit:
    """The unit of ``parameters``, which gather themselves or do not."""
    kinds = (KeptUnit, KeptExtendedUnit) if placed.keeps_whole else (PlacedUnit, PlacedExtendedUnit)
    kind = kinds[parameters[0].extended]
    return kind(spec, layout, parameters, *args, placed=placed, **kwargs)


class ExtendedParameters(PlacedParameters):
    """``DTensor`` parameters whose local tensors are of the classes that the program gave."""

    @property
    def own(self) -> Sequence[torch.Tensor]:
        """The local tensors."""
        return self._views

    def _part(self, index: int) -> torch.Tensor:
        unit, original = self._unit, self._unit.parameters[index].original
        if is_dtensor(original):
            return _torch_private.local_tensor(original)
        parameter = unit.parameters[index]
        # Of one that was initialised from the meta device they are there.
        rows, parameter.rows = parameter.rows, None
        if rows is None:
            return cut(parameter, unit.ranks.shard_rank, unit.layout.world_size, unit.spec.device)
        return rows

    def retrained(self) -> bool:
        before = self._trained
        changed = super().retrained()
        if changed:
            for parameter, own, now, was in zip(self._unit.parameters, self.own, self._trained, before, strict=True):
                if now and not was:
                    where = f"'{parameter.names[0]}' on rank {self._unit.ranks.world.rank}"
                    refuse_untrainable(own_rows(own.detach(), 0, 1), where)
        return changed

    def expose(self) -> None:
        before, self._views = self._views, [self._part(index) for index in range(len(self.tensors))]
        for index, (placed, view) in enumerate(zip(self.tensors, self._views, strict=True)):
            if (before and view is not before[index]) or self.locals[index].dtype != view.dtype:
                # Its data cannot be exchanged: there is no memory but that of the tensors inside.
                self.locals[index] = nn.Parameter(view, requires_grad=placed.requires_grad)

    def _take_values(self, found: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        unit = self._unit
        if dtype != unit.master.dtype:
            unit.rehome(torch.empty_like(unit.master, dtype=dtype))
        else:
            self.expose()
