"""Parameters that gather themselves (tensor subclasses with torch's extension protocol), as ``DTensor`` over them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from polyshard.extension import (
    ExtendedUnit,
    ExtensionArguments,
    MasterViews,
    PlacedParameters,
    PlacedUnit,
    cut,
    is_dtensor,
    local_tensor,
)
from torch import nn

from ._meshes import Placed

_is_meta = attrgetter("is_meta")


def placed_unit(
    placed: Placed, spec: Any, layout: Any, parameters: Sequence[Any], *args: Any, **kwargs: Any
) -> PlacedUnit:
    """The unit of ``parameters``, which gather themselves or do not."""
    kind = PlacedExtendedUnit if parameters[0].extended else PlacedUnit
    return kind(spec, layout, parameters, *args, placed=placed, **kwargs)


class PlacedExtendedUnit(ExtendedUnit, PlacedUnit):
    """The parameters of one ``fully_shard`` call that gather themselves."""

    def __init__(
        self, spec: Any, layout: Any, parameters: Sequence[Any], *args: Any, placed: Placed, **kwargs: Any
    ) -> None:
        mesh = placed.placings[parameters[0].names[0]].over.mesh
        if mesh.ndim == 2:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[1]]
        # Of torch's class, whichever the call was given: the parameters' classes are written for that. Ours has a field
        # of torch 2.15.
        known = torch_fsdp.MixedPrecisionPolicy.__dataclass_fields__
        settings = {name: value for name, value in vars(placed.policy).items() if name in known}
        self.arguments = ExtensionArguments(mesh, torch_fsdp.MixedPrecisionPolicy(**settings))
        super().__init__(spec, layout, parameters, *args, placed=placed, **kwargs)

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


class ExtendedParameters(PlacedParameters):
    """``DTensor`` parameters whose local tensors are of the classes that the program gave."""

    @property
    def own(self) -> Sequence[torch.Tensor]:
        """The local tensors."""
        return self._views

    def _part(self, index: int) -> torch.Tensor:
        unit, original = self._unit, self._unit.parameters[index].original
        if is_dtensor(original):
            return local_tensor(original)
        return cut(unit.parameters[index], unit.ranks.shard_rank, unit.layout.world_size, unit.spec.device)

    @property
    def _found_at(self) -> Sequence[int]:
        # Classes of programs may have no memory of their own.
        return ()

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
