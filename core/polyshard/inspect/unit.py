"""One unit of a sharded model, and its parameters, as state, optimizers and tools see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from ..errors import UnsupportedError
from ..io.boxes import Box
from ..planning.extensions import InnerTensor, Insides, inner_tensors
from ..planning.layout import FlatLayout, Piece, Slot, contiguous_stride, product
from ..planning.names import saved_name
from ..planning.parts import TensorPart, is_dtensor, plain_parameter
from ..runtime.buffers import view_of
from ..runtime.extended import ExtendedUnit

if TYPE_CHECKING:
    from ..interfaces import Collectives, OffloadManager, PrecisionPlugin
    from ..runtime.unit import Unit


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of a unit, and the part of it that this rank holds."""

    tensor: nn.Parameter
    """This rank's elements, or the whole parameter where the unit is not sharded: a plain one, over the memory of the
    ``DTensor`` that the user has."""
    shown: nn.Parameter
    """What modules and optimizers hold."""
    names: tuple[str, ...]
    """Every name under which state is saved, without what wrappers add; more than one for a shared parameter."""
    shape: tuple[int, ...]
    """Of the whole parameter, over all ranks of the model."""
    box: Box | None
    """Where this rank's elements lie in the whole; None for none, or where ranks cut inside of rows."""
    sharded: bool
    """Whether ranks of the unit hold different elements of it."""
    part: TensorPart | None
    """The part of a larger tensor that the unit has of it; None for a parameter that was no ``DTensor``."""
    slot: Slot
    """Where it lies in the unit's flat buffer."""
    start: int = 0
    """First element in this rank's shard of the unit."""
    inner: InnerTensor | None = None
    """Which tensor of a parameter that gathers itself it is, by ``ShardedUnit.stored``; None for a parameter."""

    @classmethod
    def outside(cls, name: str, parameter: nn.Parameter) -> ShardedParameter:
        """``parameter``, which is in no unit: a plain one, or a ``DTensor`` of the user's."""
        shape, local, boxes = tuple(parameter.shape), parameter, [Box.whole(parameter.shape)]
        if is_dtensor(parameter):
            placed: Any = parameter
            local = plain_parameter(parameter)
            boxes = [Box(tuple(each.offsets), tuple(each.sizes)) for each in placed.__create_chunk_list__()]
        box = next((each for each in boxes if each.numel), None)
        slot = Slot(0, product(shape), shape, contiguous_stride(shape))
        return cls(local, parameter, (name,), shape, box, tuple(local.shape) != shape, None, slot)

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of it in its gathered unit (``[padded_numel]``): of a ``part``, of what these ranks have of it."""
        return view_of(flat, self.slot.shape, self.slot.stride, self.slot.offset)

    def within_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The view of this rank's elements in something of its shard's shape (``[shard_numel]``)."""
        local = self.tensor
        return shard.as_strided(local.shape, local.stride(), shard.storage_offset() + self.start)

    @property
    def name(self) -> str:
        """The first of its names, under which state is saved."""
        return self.names[0]


class ShardedUnit:
    """Parameters that are gathered together. Handles of one unit are equal."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedUnit) and other._unit is self._unit

    @override
    def __hash__(self) -> int:
        return hash(self._unit)

    @property
    def name(self) -> str:
        """Fully-qualified name of its module, ``(root)`` for the outermost, and a suffix where that has several."""
        return self._unit.name

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """In the order of the flat buffer."""
        unit, found = self._unit, []
        pieces = {piece.slot: piece for piece in unit.pieces}
        for index, (each, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True)):
            local, part, piece = unit.held.local(index), each.part, pieces.get(index)
            shape = slot.shape if part is None else part.shape
            box = None if piece is None else _box(slot, piece, local, part)
            start = 0 if piece is None else piece.shard_offset
            sharded = unit.ranks.owner is not None
            names = self._saved(each.names)
            found.append(ShardedParameter(local, each.original, names, shape, box, sharded, part, slot, start))
        return tuple(found)

    def _saved(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Paths in the outermost module as names in state dicts."""
        root = self._unit.root
        if root is None:
            # Of a drop-in, before its model is known.
            return names
        outermost = root.module_states[0].module
        return tuple(dict.fromkeys(saved_name(outermost, name) for name in names))

    @property
    def stored(self) -> tuple[ShardedParameter, ...]:
        """What has the values of its parameters: these themselves, or what those that gather themselves are made of.

        An inner tensor is named behind its parameter (``weight.scales``), and a plain tensor of this rank's memory.

        Raises UnsupportedError: what a parameter is made of cannot be told.
        """
        unit, parameters = self._unit, self.parameters
        if not isinstance(unit, ExtendedUnit):
            return parameters
        unit.held.require_insides("A state dict, checkpoint or stream")
        return tuple(
            _stored(parameter, index, inner, own)
            for index, parameter in enumerate(parameters)
            for inner, own in unit.held.inner_of(index)
        )

    @property
    def insides(self) -> Mapping[str, Insides]:
        """By name of a parameter that gathers itself, and has no plain tensor of its name, what it is made of."""
        parameters = self._unit.parameters
        return {
            self._saved(each.names[:1])[0]: each.insides
            for each in parameters
            if each.insides and not each.insides.is_plain
        }

    @property
    def extended(self) -> bool:
        """Whether its parameters gather themselves."""
        return self._unit.extended

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The plain tensors with this rank's values of all parameters."""
        unit = self._unit
        if not isinstance(unit, ExtendedUnit):
            return (unit.master,)
        return tuple(inner for own in unit.held.own for inner in inner_tensors(own))

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros of the shape of this rank's shard (``[shard_numel]``), where its values are."""
        unit = self._unit
        device = unit.spec.device if unit.extended else unit.master.device
        return torch.zeros(unit.layout.shard_numel, dtype=dtype, device=device)

    def refuse_added(self, call: str) -> None:
        """Raise where a parameter that gathers itself has tensors that it had not when it was sharded.

        Raises UnsupportedError: naming it; they would be of the values of before.
        """
        unit = self._unit
        for index, own in enumerate(unit.held.own if isinstance(unit, ExtendedUnit) else ()):
            names: Sequence[str] = own.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            added = sorted(set(names) - {each.attribute for each, _ in unit.held.inner_of(index)})  # type: ignore[attr-defined]
            if added:
                raise UnsupportedError(
                    f"{call}: '{unit.parameters[index].names[0]}', a {type(own).__name__}, has {', '.join(added)} now, "
                    f"and had not when it was sharded (rank {unit.ranks.world.rank}): that would be of the values "
                    "before. Load before the first step, or set it to None."
                )

    @property
    def tensors(self) -> Sequence[nn.Parameter]:
        """The user's own parameters, without their places: for steps that touch them often."""
        return self._unit.held.tensors

    @property
    def master(self) -> torch.Tensor:
        """This rank's shard of the flat unit (``[shard_numel]``, master dtype), where it is offloaded if it is.

        Raises UnsupportedError: its parameters gather themselves.
        """
        self._unit.refuse_extended("A function over flat shards")
        return self._unit.master

    @property
    def layout(self) -> FlatLayout:
        """Where parameters lie in the flat unit, and how ranks cut it."""
        return self._unit.layout

    @property
    def shard(self) -> Collectives | None:
        """The ranks that hold one shard each; None where every rank holds the whole unit."""
        return self._unit.ranks.owner

    @property
    def reduction(self) -> Collectives | None:
        """The ranks among which gradients are scattered: those of ``shard``, or with ``hfsdp`` those of a group."""
        return self._unit.ranks.reduction

    @property
    def rows(self) -> int:
        """How many shards this rank has of the parameters that are gathered: 1, but for ``hfsdp``."""
        route = self._unit.ranks.route
        return 1 if route is None else route.rows

    @property
    def replicate(self) -> Collectives | None:
        """The ranks that hold the same shard; None where there is no other."""
        return self._unit.ranks.replicate

    @property
    def groups(self) -> tuple[Collectives, ...]:
        """Groups through which a value reaches all ranks with pieces of it, one after the other; empty for one rank."""
        ranks = self._unit.ranks
        if ranks.world.world_size == ranks.number:
            return () if ranks.alone else (ranks.world,)
        return tuple(each for each in (ranks.owner, ranks.replicate) if each is not None)

    @property
    def copied_slots(self) -> tuple[int, ...]:
        """Slots of parameters that all ranks copy, where there are others than of ``shard`` and ``replicate``."""
        unit = self._unit
        if unit.ranks.alike or len(self.tensors) != len(unit.parameters):
            return ()
        everywhere = unit.ranks.world.world_size // unit.ranks.shard_size
        copies = unit.copies if len(unit.copies) > 1 else unit.copies * len(unit.parameters)
        return tuple(slot for slot, number in enumerate(copies) if number == everywhere)

    @property
    def shard_rank(self) -> int:
        return self._unit.ranks.shard_rank

    @property
    def flat_parameter(self) -> nn.Parameter | None:
        """The parameter that an optimizer has in the place of all of the unit's; None where nobody asked for it."""
        return None if self._unit.held.flat is None else self._unit.held.flat.parameter

    @property
    def flat_local(self) -> nn.Parameter | None:
        """This rank's elements of ``flat_parameter``, as a plain parameter over their memory."""
        return None if self._unit.held.flat is None else self._unit.held.flat.local

    @property
    def receivers(self) -> Sequence[nn.Parameter]:
        """The parameters whose ``.grad`` the reduced gradient arrives in."""
        return self._unit.held.receivers

    @property
    def trained(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return self._unit.trainable

    @property
    def awaits_reduction(self) -> bool:
        """Whether gradients of earlier microbatches wait for a backward outside of ``no_sync``."""
        return self._unit.gradients.unreduced

    @property
    def packed(self) -> bool:
        """Whether its parameters are frozen and of packed classes: bytes whose meaning stands in their attributes."""
        return bool(self._unit.packed)

    @property
    def attribute_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in these attributes, whole on every rank."""
        return tuple(tensor for each in self._unit.packed for tensor in each.tensors)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self._unit.spec.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters."""
        return self._unit.dtypes.compute

    @property
    def grad_dtype(self) -> torch.dtype:
        """Dtype of ``.grad``."""
        return self._unit.dtypes.grad

    @property
    def precision(self) -> PrecisionPlugin:
        return self._unit.precision

    @property
    def offload(self) -> OffloadManager:
        return self._unit.offload

    @property
    def offloaded(self) -> bool:
        """Whether ``offload`` keeps its master and gradient."""
        return self._unit.offloaded

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered unit; 0 where compute uses the master."""
        return self._unit.gathered.nbytes

    @property
    def reduction_nbytes(self) -> int:
        """Bytes of its whole gradient while ranks reduce it; 0 where none is reduced."""
        unit = self._unit
        return unit.gradients.input.nbytes if unit.trainable else 0

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the result on this rank, which replicas add up; 0 where none is reduced."""
        if not self.reduction_nbytes:
            return 0
        reduction = self._unit.gradients.input
        return reduction.layout.shard_numel * reduction.result_dtype.itemsize

    @property
    def gather_buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffer that gathers fill, and what is kept of it; none where compute uses the master."""
        if self._unit.permanent:
            return ()
        buffer = self._unit.gathered.buffer
        return (buffer.flat,) if buffer.secondary is None else (buffer.flat, buffer.secondary.memory)

    @property
    def reduction_buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers of whole gradients: the next reduction's input, and the sum of microbatches before it."""
        if self.shard is None or not self.reduction_nbytes:
            return ()
        inputs = dict.fromkeys((self._unit.gradients.input, self._unit.gradients.sums))
        held = [buffer for each in inputs for buffer in (each.buffer, each.sum)]
        return tuple(each.flat for each in held if each is not None)


def _box(slot: Slot, piece: Piece, local: torch.Tensor, part: TensorPart | None) -> Box | None:
    """Where ``piece`` lies in the whole tensor; None of one that is no box."""
    if not slot.by_rows:
        return None
    first = piece.start * slot.shape[slot.dim] // slot.numel if slot.shape else 0
    offsets = tuple(first if dim == slot.dim else 0 for dim in range(len(slot.shape)))
    box = Box(offsets, tuple(local.shape)[: len(offsets)])
    return box if part is None else box.moved(part.offset)


def _stored(parameter: ShardedParameter, index: int, inner: InnerTensor, own: torch.Tensor) -> ShardedParameter:
    """``inner`` of ``parameter``, the unit's number ``index``, of which this rank has ``own``."""
    names = tuple(f"{name}.{inner.name}" if inner.name else name for name in parameter.names)
    shape, (start, stop) = inner.shape, inner.rows
    # A number, as a mean of scales, has no rows.
    offsets, sizes = ((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:])) if shape else ((), ())
    box = Box(offsets, sizes) if start < stop and product(shape) else None
    tensor: Any = own
    return replace(
        parameter,
        tensor=tensor,
        names=names,
        shape=shape,
        box=box,
        slot=Slot(0, product(shape), shape, contiguous_stride(shape), segment=index),
        start=0,
        sharded=parameter.sharded and inner.is_cut,
        inner=inner,
    )
