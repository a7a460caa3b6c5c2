"""Whole tensors that this rank holds parts of: their boxes, and the parameters that an optimizer's stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..inspect import ShardedModel, ShardedParameter, saved_parameters
from ..io.boxes import Box, Chunk

#: Keys of a model's values, and an optimizer's, in all that is saved and loaded.
MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True, slots=True)
class KeptPiece:
    """A piece of a parameter whose state this rank may keep in another form than other ranks keep theirs."""

    label: str
    """Tells it from other pieces of the parameter."""
    numel: int
    """Elements of the piece."""
    whole: int
    """Elements of the parameter."""
    flat: torch.Tensor
    """The numbers of this rank, 1-D."""


class CheckpointTensor(torch.Tensor):
    """Stands for a whole tensor. This rank holds some of its chunks, possibly none.

    For checkpoints: a ``DTensor`` can neither have a few blocks nor less than all ranks of its mesh have. Users get
    none: it has the whole tensor's shape, dtype and device, and the memory of one element.
    """

    chunks: tuple[Chunk, ...] = ()
    #: Whether other ranks hold other parts of the parameter by tensor or expert parallelism.
    is_part: bool = False
    #: Set where a checkpoint may have to write the numbers of each piece by themselves.
    kept: KeptPiece | None = None

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        chunks: Iterable[Chunk],
        is_part: bool = False,
    ) -> CheckpointTensor:
        with torch.inference_mode(False), torch.no_grad():
            stand_in = torch.empty((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(cls)
        stand_in.chunks, stand_in.is_part = tuple(chunks), is_part
        return stand_in


def of_parameter(parameter: ShardedParameter, local: torch.Tensor) -> CheckpointTensor:
    """``local``, of this rank's shape of ``parameter``, with any strides, as a part of a tensor of the whole one's."""
    shape, local = parameter.shape, local.detach()
    # Empty parameters lie in no shard, and would be missing from the checkpoint if nobody wrote them.
    if 0 in shape:
        return whole(local.new_empty(shape))
    chunks = [] if parameter.box is None else [Chunk(parameter.box, local.view(parameter.box.sizes))]
    return CheckpointTensor(shape, local.dtype, local.device, chunks, parameter.part is not None)


def whole(tensor: torch.Tensor) -> CheckpointTensor:
    """A tensor that this rank holds whole, with any strides."""
    chunk = Chunk(Box.whole(tensor.shape), tensor.detach())
    return CheckpointTensor(tensor.shape, tensor.dtype, tensor.device, [chunk])


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter that an optimizer holds, and the parameters of the model that it stands for."""

    parameter: nn.Parameter
    """This rank's elements: a plain parameter."""
    stands_for: tuple[ShardedParameter, ...]
    """One, but for a flat parameter."""
    unit: str | None = None
    """The unit that a flat parameter stands for; None for a parameter of the model."""

    @property
    def names(self) -> tuple[str, ...]:
        """First fully-qualified names of the parameters."""
        return tuple(each.name for each in self.stands_for)

    @property
    def label(self) -> str:
        return f"'{self.names[0]}'" if self.unit is None else f"the flat parameter of unit '{self.unit}'"

    @property
    def partial(self) -> bool:
        """Whether its shape on this rank is not that of a parameter of the unsharded model."""
        return self.unit is not None or any(each.sharded or each.part is not None for each in self.stands_for)

    @property
    def here(self) -> tuple[ShardedParameter, ...]:
        """The parameters whose state this rank saves and loads.

        A rank without an element of a parameter gets no gradient of it, so that the optimizer lets its state stand
        still: its number of steps is not the parameter's. Empty parameters stand still on every rank.
        """
        return tuple(each for each in self.stands_for if each.box is not None or 0 in each.shape)

    def has_elements(self, value: object) -> bool:
        """Whether ``value`` of its state is a tensor with a number for each element."""
        return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == self.parameter.shape

    def parts(self, local: torch.Tensor) -> dict[str, CheckpointTensor]:
        """``local``, of the shape of ``parameter``, cut into those of ``here``."""
        if self.unit is None:
            return {each.name: of_parameter(each, local) for each in self.here}
        return {each.name: of_parameter(each, each.within_shard(local)) for each in self.here}


def parameters_of(model: ShardedModel, *, stored: bool = False) -> Iterator[ShardedParameter]:
    """Every parameter of a unit, or what has its values (``ShardedUnit.stored``).

    Raises ParameterChangedError: modules moved, so that a name is another parameter's now.
    """
    model.refuse_moved()
    for unit in model.units:
        yield from unit.stored if stored else unit.parameters


def holdings(model: ShardedModel, groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, Holding]:
    """The parameters that each one of an optimizer's ``groups`` stands for, in their order.

    Raises:
        ConfigError: one is not the model's, or two stand for the same parameter.
        ParameterChangedError: as ``parameters_of``.
    """
    model.refuse_moved()
    known: dict[int, Holding] = {}
    for unit in model.units:
        found = unit.parameters
        known.update({id(each.shown): Holding(each.tensor, (each,)) for each in found})
        flat, local = unit.flat_parameter, unit.flat_local
        if flat is not None and local is not None:
            known[id(flat)] = Holding(local, found, unit.name)
    for name, parameter in saved_parameters(model.module):
        if id(parameter) not in known:
            one = ShardedParameter.outside(name, parameter)
            known[id(parameter)] = Holding(one.tensor, (one,))
    held: dict[nn.Parameter, Holding] = {}
    taken: set[str] = set()
    for index, group in enumerate(groups):
        for position, parameter in enumerate(group["params"]):
            where = f"Parameter {position} of the optimizer's group {index}, of shape {tuple(parameter.shape)},"
            holding = known.get(id(parameter))
            if holding is None:
                raise ConfigError(
                    f"{where} is not a parameter of the model (rank {model.rank}). Pass the optimizer that was made "
                    "from this model's parameters."
                )
            twice = next((name for name in holding.names if name in taken), None)
            if twice is not None:
                raise ConfigError(
                    f"{where} stands for '{twice}', which the optimizer has already (rank {model.rank}). Give it the "
                    "flat parameter of a unit or the unit's own parameters, not both."
                )
            taken.update(holding.names)
            held[parameter] = holding
    return held


def names_by_group(model: ShardedModel, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """First names of the parameters that each of ``groups`` has, or its flat ones stand for. Raises as ``holdings``."""
    held = holdings(model, groups)
    return [[name for parameter in group["params"] for name in held[parameter].names] for group in groups]
