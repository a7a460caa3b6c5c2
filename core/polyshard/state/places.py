"""Which part of which parameter this rank holds, and which parameters each one of an optimizer stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..planning.layout import Piece, Slot
from ..runtime.root import Root
from ..runtime.unit import Unit
from .sharded import CheckpointTensor, of_piece, of_rows, whole

#: Under which a model's values, and an optimizer's, lie in what is saved and loaded.
MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True, slots=True)
class Place:
    """A sharded parameter, and the part of it that this rank holds."""

    name: str
    """Its first fully-qualified name."""
    parameter: nn.Parameter
    """The user's own object: elements of this rank, or the whole parameter where the unit is not cut."""
    slot: Slot
    piece: Piece | None
    """The elements of this rank; None for none."""
    cut: bool
    """Whether the unit is cut at all."""

    def value(self) -> CheckpointTensor:
        """The parameter itself."""
        return self.shaped(self.parameter)

    def shaped(self, local: torch.Tensor) -> CheckpointTensor:
        """``local``, of the local parameter's shape, as this rank's part of a tensor of the whole one's."""
        if not self.cut:
            return whole(local)
        in_rows = self.slot.by_rows and local.ndim > 1
        return (of_rows if in_rows else of_piece)(self.slot, self.piece, local.detach())

    def within(self, shard: torch.Tensor) -> CheckpointTensor:
        """The part in ``shard``, of the shape of this rank's shard of the unit, in the same form; a view."""
        start, numel = (0, 0) if self.piece is None else (self.piece.shard_offset, self.piece.numel)
        return of_piece(self.slot, self.piece, shard.detach().narrow(0, start, numel))


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter that an optimizer holds, and the parameters of the model that it stands for."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """First fully-qualified names of the parameters: one, but for a flat parameter."""
    places: tuple[Place, ...] = ()
    """Where they lie, in the order of ``names``; none for a parameter that is not sharded."""
    unit: str | None = None
    """The unit that a flat parameter stands for; None for a parameter of the model."""

    @property
    def described(self) -> str:
        """For errors."""
        return f"'{self.names[0]}'" if self.unit is None else f"the flat parameter of unit '{self.unit}'"

    @property
    def partial(self) -> bool:
        """Whether its shape on this rank is not that of a parameter of the unsharded model."""
        return self.unit is not None or any(place.cut for place in self.places)

    @property
    def here(self) -> tuple[str, ...]:
        """Names of the parameters whose state this rank tells of, and takes.

        Where a rank has no element of a parameter, no gradient comes, and the optimizer lets the state stand still: its
        number of steps is not the parameter's. Empty parameters are nobody's, and stand still everywhere.
        """
        if not self.places:
            return self.names
        return tuple(place.name for place in self.places if place.piece is not None or place.slot.numel == 0)

    def parts(self, local: torch.Tensor) -> dict[str, CheckpointTensor]:
        """``local``, of the shape of ``parameter``, cut into those of ``here``. Only where there are ``places``."""
        here = set(self.here)
        return {
            place.name: place.shaped(local) if self.unit is None else place.within(local)
            for place in self.places
            if place.name in here
        }


def places(root: Root) -> Iterator[Place]:
    """Every sharded parameter.

    Raises:
        ParameterChangedError: modules moved, so that a name is another parameter's now.
    """
    root.refuse_moved()
    for unit in root.units:
        yield from places_of(unit)


def places_of(unit: Unit) -> Iterator[Place]:
    """Every parameter of ``unit``, in the order of the flat buffer."""
    pieces = {piece.slot: piece for piece in unit.pieces}
    for index, (parameter, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True)):
        yield Place(parameter.names[0], parameter.original, slot, pieces.get(index), cut=unit.grid.shard is not None)


def holdings(root: Root, groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, Holding]:
    """What each parameter of an optimizer's ``groups`` stands for, in their order.

    Raises:
        ConfigError: one is not the model's, or two stand for the same parameter.
        ParameterChangedError: as ``places``.
    """
    root.refuse_moved()
    known = {id(each): Holding(each, (name,)) for name, each in root.module_states[0].module.named_parameters()}
    for unit in root.units:
        found = tuple(places_of(unit))
        known.update({id(place.parameter): Holding(place.parameter, (place.name,), (place,)) for place in found})
        if unit.flat is not None:
            flat = unit.flat.parameter
            known[id(flat)] = Holding(flat, tuple(place.name for place in found), found, unit.name)
    held: dict[nn.Parameter, Holding] = {}
    taken: set[str] = set()
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            where = f"Parameter {position} of the optimizer's group {index}, of shape {tuple(parameter.shape)},"
            holding = known.get(id(parameter))
            if holding is None:
                raise ConfigError(
                    f"{where} is not a parameter of the model (rank {root.rank}). Pass the optimizer that was made "
                    "from this model's parameters."
                )
            if not taken.isdisjoint(holding.names):
                raise ConfigError(
                    f"{where} stands for '{next(name for name in holding.names if name in taken)}', which the "
                    f"optimizer has already (rank {root.rank}). Give it the flat parameter of a unit or the unit's "
                    "own parameters, not both."
                )
            taken.update(holding.names)
            held[parameter] = holding
    return held
