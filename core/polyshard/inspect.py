"""The one door to a sharded model: its units, parameters, ranks and phase.

State, optimizers, checkpoints, tools and trainers see a sharded model through these handles, and never import the
runtime. A handle refers to the runtime's object and keeps no copy: what it says is true when it is asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from .api import outermost_root, root_around
from .errors import CollectiveError, StateError, UnsupportedError
from .functions.block_states import (
    Blocks,
    Role,
    StateTensor,
    blocks_of,
    is_inside,
    put_together,
    role_of,
    state_name_of,
    taken_apart,
)
from .functions.lookup import live_roots
from .functions.optimizers import NOT_BY_ELEMENT
from .functions.recorded_streams import RecordedStreams, Stream, StreamRecorder
from .functions.torch_functions import replacing_values
from .functions.whole import (
    ToSome,
    WholeGather,
    gather_inner,
    gather_whole,
    state_dicts_of_pieces,
    whole_on_this_rank,
)
from .planning.extensions import InnerTensor, Insides, inner_tensors
from .planning.layout import FlatLayout, Piece, Slot, contiguous_stride, product
from .planning.parts import TensorPart, is_dtensor, local_of, whole_tensors
from .planning.plan import MODULE_STATE_ATTRIBUTE, refuse_sharded
from .planning.plan import refuse_unshardable as refuse_unshardable_parameters
from .planning.values import send_from_first
from .runtime import graph
from .runtime.extended import ExtendedUnit
from .runtime.gather import view_of
from .runtime.grouped import GroupedState
from .runtime.module_state import ModuleState
from .runtime.root import root_of
from .runtime.step import Phase
from .runtime.unit import Reshard
from .setup.build import refuse_broken
from .setup.materialize import Initializer

if TYPE_CHECKING:
    from pathlib import Path

    from .interfaces import Collectives, OffloadManager, PrecisionCaster
    from .runtime.root import Root
    from .runtime.unit import Unit

__all__ = [
    "NOT_BY_ELEMENT",
    "Blocks",
    "EndsWithModel",
    "FlatLayout",
    "Initializer",
    "Insides",
    "LocatedParameter",
    "Phase",
    "Piece",
    "Role",
    "ShardedModel",
    "ShardedParameter",
    "ShardedUnit",
    "Slot",
    "StateTensor",
    "Stream",
    "StreamRecorder",
    "TensorPart",
    "WaitingTimes",
    "WholeFlats",
    "blocks_of",
    "find",
    "gathers_to",
    "idle_model",
    "inner_tensors",
    "is_dtensor",
    "is_inside",
    "is_sharded",
    "local_of",
    "models",
    "models_changed",
    "outermost_model",
    "put_together",
    "refuse_unshardable",
    "role_of",
    "savable_model",
    "savable_part",
    "send_from_first",
    "sharded_model",
    "state_dicts_of_pieces",
    "state_name_of",
    "taken_apart",
    "units_in",
    "whole_tensors",
]


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of a unit, and the part of it that this rank holds."""

    tensor: nn.Parameter
    """This rank's elements, or the whole parameter where the unit is not sharded: the user's own object, unless that
    is a ``DTensor`` over the same memory."""
    names: tuple[str, ...]
    """Every fully-qualified name; more than one for a shared parameter."""
    slot: Slot
    """Where it lies in the unit's flat buffer, and its whole shape."""
    piece: Piece | None
    """The elements of this rank; None for none."""
    sharded: bool
    """Whether ranks hold different elements of it."""
    part: TensorPart | None
    """The part of a larger tensor that all of the above is about; None for a parameter that was no ``DTensor``."""
    first: bool = True
    """Whether this rank is of the first group of ranks that holds the parameter, where others hold copies of it."""
    cut_alike: bool = True
    """Whether all of these groups cut it at the same places."""
    inner: InnerTensor | None = None
    """Which tensor of a parameter that gathers itself it is, by ``ShardedUnit.stored``; None for a parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, over all ranks of the model."""
        return self.slot.shape if self.part is None else self.part.shape

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of it in its gathered unit (``[padded_numel]``): of a ``part``, of what these ranks have of it."""
        return view_of(flat, self.slot.shape, self.slot.stride, self.slot.offset)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """All of it, out of its gathered unit (``[padded_numel]``): a view, or a copy of what ranks with parts have.

        Where it is a ``part``, all ranks of that one's mesh call it.
        """
        return self.within(flat) if self.part is None else self.part.whole(self.within(flat))

    @property
    def name(self) -> str:
        """The first of its names, under which state is saved."""
        return self.names[0]


class ShardedUnit:
    """Parameters that are gathered together. Handles of one unit are equal."""

    __slots__ = ("_unit",)

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedUnit) and other._unit is self._unit

    def __hash__(self) -> int:
        return hash(self._unit)

    @property
    def name(self) -> str:
        """Fully-qualified name of its module, ``(root)`` for the outermost, and a suffix where that has several."""
        return self._unit.name

    def reference(self) -> object:
        """Equal for handles of the same unit; does not keep it alive."""
        return weakref.ref(self._unit)

    @property
    def parameters(self) -> tuple[ShardedParameter, ...]:
        """In the order of the flat buffer."""
        unit = self._unit
        pieces = {piece.slot: piece for piece in unit.pieces}
        ranks, sharded = unit.ranks, unit.ranks.owner is not None
        # Parts of different sizes move what lies behind them in the flat buffer.
        alike = ranks.alike or all(each.part is None or each.part.is_even for each in unit.parameters)
        return tuple(
            ShardedParameter(
                unit.held_for(index)[-1],
                each.names,
                slot,
                pieces.get(index),
                sharded,
                each.part,
                ranks.alike or ranks.is_first(each.part),
                alike,
            )
            for index, (each, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True))
        )

    @property
    def stored(self) -> tuple[ShardedParameter, ...]:
        """What has the values of its parameters: these themselves, or what those that gather themselves are made of.

        An inner tensor is named behind its parameter (``weight.scales``), and a plain tensor of this rank's memory.

        Raises:
            UnsupportedError: what a parameter is made of cannot be told.
        """
        unit, parameters = self._unit, self.parameters
        if not isinstance(unit, ExtendedUnit):
            return parameters
        unit.require_insides("A state dict, checkpoint or stream")
        return tuple(
            _stored(parameter, index, inner, own)
            for index, parameter in enumerate(parameters)
            for inner, own in unit.inner_of(index)
        )

    @property
    def insides(self) -> Mapping[str, Insides]:
        """By name of a parameter that gathers itself, and has no plain tensor of its name, what it is made of."""
        parameters = self._unit.parameters
        return {each.names[0]: each.insides for each in parameters if each.insides and not each.insides.is_plain}

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
        return tuple(inner for own in unit.own_tensors for inner in inner_tensors(own))

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros of the shape of this rank's shard (``[shard_numel]``), where its values are."""
        unit = self._unit
        device = unit.spec.device if unit.extended else unit.master.device
        return torch.zeros(unit.layout.shard_numel, dtype=dtype, device=device)

    def refuse_added(self, call: str) -> None:
        """Raise where a parameter that gathers itself has tensors that it had not when it was sharded.

        Raises:
            UnsupportedError: naming it; they would be of the values of before.
        """
        unit = self._unit
        for index, own in enumerate(unit.own_tensors if isinstance(unit, ExtendedUnit) else ()):
            names: Sequence[str] = own.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            added = sorted(set(names) - {each.attribute for each, _ in unit.inner_of(index)})  # type: ignore[attr-defined]
            if added:
                raise UnsupportedError(
                    f"{call}: '{unit.parameters[index].names[0]}', a {type(own).__name__}, has {', '.join(added)} now, "
                    f"and had not when it was sharded (rank {unit.ranks.world.rank}): that would be of the values "
                    "before. Load before the first step, or set it to None."
                )

    @property
    def tensors(self) -> Sequence[nn.Parameter]:
        """The user's own parameters, without their places: for steps that touch them often."""
        return self._unit.originals.tensors

    @property
    def master(self) -> torch.Tensor:
        """This rank's shard of the flat unit (``[shard_numel]``, master dtype), where it is parked if it is.

        Raises:
            UnsupportedError: its parameters gather themselves.
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
        """Slots of parameters that all ranks of the model have copies of, those beside ``shard`` and ``replicate`` too.

        Empty where there are no others.
        """
        unit = self._unit
        if unit.ranks.alike or len(self.tensors) != len(unit.parameters):
            return ()
        everywhere = unit.ranks.world.world_size // unit.ranks.shard_size
        copies = unit.copies if len(unit.copies) > 1 else unit.copies * len(unit.parameters)
        return tuple(slot for slot, number in enumerate(copies) if number == everywhere)

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return self._unit.ranks.shard_rank

    @property
    def flat_parameter(self) -> nn.Parameter | None:
        """The parameter that an optimizer has in the place of all of the unit's; None where nobody asked for it."""
        return None if self._unit.flat is None else self._unit.flat.parameter

    @property
    def receivers(self) -> Sequence[nn.Parameter]:
        """The parameters whose ``.grad`` the reduced gradient arrives in."""
        return self._unit.receivers

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
    def parked(self) -> bool:
        """Whether its offload manager keeps the master and the gradient."""
        return self._unit.parks

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
    def caster(self) -> PrecisionCaster:
        """Its precision plugin."""
        return self._unit.caster

    @property
    def offload(self) -> OffloadManager:
        """Its offload plugin."""
        return self._unit.offload

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gathered unit; 0 where compute uses the master."""
        return self._unit.gathered_nbytes

    @property
    def reduction_nbytes(self) -> int:
        """Bytes of its whole gradient while ranks reduce it; 0 where none is reduced."""
        unit = self._unit
        return unit.gradients.input.nbytes if unit.trainable and not unit.resident else 0

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the result on this rank, which replicas add up; 0 where none is reduced."""
        if not self.reduction_nbytes:
            return 0
        reduction = self._unit.gradients.input
        return reduction.layout.shard_numel * reduction.result_dtype.itemsize

    @property
    def gather_buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffer that gathers fill, and what is kept of it behind a forward; their memory comes and goes.

        None where compute uses the master.
        """
        if self._unit.permanent:
            return ()
        buffer = self._unit.buffer
        return (buffer.flat,) if buffer.post_forward is None else (buffer.flat, buffer.post_forward.memory)

    @property
    def reduction_buffers(self) -> tuple[torch.Tensor, ...]:
        """The flat buffers of whole gradients: the next reduction's input, and the sum of microbatches before it."""
        if self.shard is None or not self.reduction_nbytes:
            return ()
        reduction = self._unit.gradients.input
        return tuple(each.flat for each in (reduction.buffer, reduction.sum) if each is not None)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The whole flat tensor (``[padded_numel]``) of which each rank has ``own`` (``[shard_numel]``).

        On the device that computes. Every rank of the unit calls it. ``own`` itself where nothing is sharded and it
        is there already.
        """
        return gather_whole(self._unit, own)


def _stored(parameter: ShardedParameter, index: int, inner: InnerTensor, own: torch.Tensor) -> ShardedParameter:
    """``inner`` of ``parameter``, the unit's number ``index``, of which this rank has ``own``."""
    names = tuple(f"{name}.{inner.name}" if inner.name else name for name in parameter.names)
    shape, row, (start, stop) = inner.shape, product(inner.shape[1:]), inner.rows
    slot = Slot(0, product(shape), shape, contiguous_stride(shape), by_rows=inner.is_cut, segment=index)
    piece = Piece(0, start * row, stop * row, 0) if start < stop else None
    tensor: Any = own
    return replace(
        parameter,
        tensor=tensor,
        names=names,
        slot=slot,
        piece=piece,
        sharded=parameter.sharded and inner.is_cut,
        inner=inner,
    )


class ShardedModel:
    """A model, seen at its outermost sharded module. Handles of one model are equal."""

    __slots__ = ("_root", "_units")

    def __init__(self, root: Root) -> None:
        self._root = root
        self._units: tuple[ShardedUnit, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedModel) and other._root is self._root

    def __hash__(self) -> int:
        return hash(self._root)

    @property
    def units(self) -> tuple[ShardedUnit, ...]:
        """Every unit, in module order."""
        self._units = self._units or tuple(map(ShardedUnit, self._root.units))
        return self._units

    @property
    def module(self) -> nn.Module:
        """The outermost sharded module."""
        return self._root.module_states[0].module

    def name_of(self, module: nn.Module) -> str:
        """Of a module inside it, for ranks to compare; empty for the outermost."""
        return next((name for name, each in self.module.named_modules() if each is module), "")

    @property
    def collectives(self) -> Collectives:
        """All ranks that share the model."""
        return self._root.collectives

    @property
    def topology(self) -> str:
        """The groups of its units, in words, where ranks hold different parts of the model; empty elsewhere."""
        ranks = {unit.ranks for unit in self._root.units}
        if all(each.world.world_size <= each.number for each in ranks):
            return ""
        return ", ".join(sorted({f"{each.number} of {each.world.world_size} over {each.label}" for each in ranks}))

    @property
    def rank(self) -> int:
        """This process's rank among them."""
        return self._root.rank

    @property
    def phase(self) -> Phase:
        """Where the model stands in a step."""
        return self._root.phase

    @property
    def timeout_s(self) -> float:
        """Seconds that ranks wait for each other, by the configuration."""
        return self._root.timeout_s

    def reference(self) -> Callable[[], ShardedModel | None]:
        """A call that gives this handle anew as long as the model lives, and does not keep it alive."""
        reference = weakref.ref(self._root)

        def model() -> ShardedModel | None:
            root = reference()
            return None if root is None else ShardedModel(root)

        return model

    def attached(self, make: Callable[[], A]) -> A:
        """What ``make`` gave for this model at the first call. It lives with the model and is closed before it."""
        if self._root.attached is None:
            self._root.attached = _Attached(make())
        found: A = self._root.attached.value  # type: ignore[attr-defined]
        return found

    def refuse_inside_step(self, call: str) -> None:
        """Raise unless the model is between steps, open, and not whole; ``call`` begins the message.

        A backward that raised is given up.

        Raises:
            StateError: saying where the model stands.
        """
        root = self._root
        root.leave_failed_backward()
        root.refuse_ended(call)
        root.refuse_open_stream(call)
        if root.phase is not Phase.IDLE:
            raise StateError(
                f"{call} was called inside a {root.phase.value} of the model (rank {root.rank}). Call it between steps."
            )
        if root.unsharded:
            raise StateError(
                f"{call} was called inside polyshard.unsharded() (rank {root.rank}). Leave the context first."
            )

    def refuse_ended(self, call: str) -> None:
        """Raise if the model was closed or a communication failed; ``call`` begins the message.

        Raises:
            StateError: saying which.
        """
        self._root.refuse_ended(call)

    def refuse_unnamed(self, call: str) -> None:
        """Raise where ranks have other parameters under the same names, and nothing says which part of what each is.

        Raises:
            UnsupportedError: naming a parameter; ``call`` begins the message.
        """
        here = self._root.collectives.world_size
        # Ranks that compute with other samples, and share no gradients of a parameter, have another one each.
        most = self._root.data_ranks
        for unit in self._root.units:
            ranks = unit.ranks
            for each in unit.parameters:
                if each.part is not None and here < ranks.number * each.part.number:
                    what = f"has parts on other ranks than the {here} of the model"
                    remedy = "Shard the model over a mesh that has them too"
                elif each.part is None and (ranks.spread > 1 or ranks.number < most):
                    what = f"belongs to {ranks.number} of {here} ranks, and others have another one of its name"
                    remedy = (
                        "Say before shard() which part of the whole each rank has, by DTensor.from_local(parameter, "
                        "mesh['ep'], [Shard(0)])"
                    )
                else:
                    continue
                raise UnsupportedError(
                    f"{call}: '{each.names[0]}' {what} (rank {ranks.world.rank}). {remedy}, or save "
                    "polyshard.local_state_dict(model) on each rank, for the same mesh."
                )

    def adopt_changes(self, *, trains: bool | None = None, all_modules: bool = False) -> None:
        """Take over what the user did to parameters since the last forward; see ``Root.adopt_changes``.

        Raises:
            ParameterChangedError: a parameter was removed, replaced by an unlike one, tied, or came later and trains.
        """
        self._root.adopt_changes(trains=trains, all_modules=all_modules)
        # Whoever asks between steps may write to masters.
        self._root.outdate()

    def refuse_moved(self) -> None:
        """Raise where modules moved, so that a name is another parameter's now.

        Raises:
            ParameterChangedError: naming one.
        """
        self._root.refuse_moved()

    def meeting(
        self, operation: str, groups: Iterable[Collectives | None], detail: str = ""
    ) -> AbstractContextManager[None]:
        """A context for communications between steps over ``groups``, which ranks compare where they can.

        Args:
            operation: Names them in errors.
            groups: What communicates inside.
            detail: What else must be alike on all ranks.
        """
        return self._root.meeting(operation, groups, detail)

    def tell_failure(self, error: Exception) -> None:
        """Let the other ranks know of an exception of this rank's program."""
        self._root.recorder.post_error(error)

    def fail(self, error: CollectiveError) -> None:
        """Let every later use be refused: a communication did not end, and ranks stand at different places."""
        self._root.recorder.fail(error)

    def wait_for_communication(self) -> None:
        """Order compute on the current stream after every gather and reduction that was issued."""
        self._root.streams.drain()

    def gathers_of(self, unit: ShardedUnit) -> tuple[Collectives, ...]:
        """Among whom a forward and a backward gather ``unit``: twice where it is released in between."""
        inner = unit._unit
        if unit.shard is None or inner.permanent:
            return ()
        # The backward of the outermost module follows its forward at once.
        if not inner.releases(inner in self._root.module_states[0].units):
            return (unit.shard,)
        among = inner.neighbours if inner.reshard_policy is Reshard.PARTLY else None
        return unit.shard, among or unit.shard

    def record_streams(self, recorder: StreamRecorder) -> None:
        """Run communication where it is issued from now on, and report to ``recorder`` the streams of a device."""
        self._root.use_streams(RecordedStreams(recorder))

    def refuse_replaced_values(self, call: str) -> None:
        """Raise inside ``replacing_values``; ``call`` begins the message.

        Raises:
            StateError: naming the context.
        """
        if self._root.replaced:
            raise StateError(
                f"{call} was called inside of {self._root.replaced[0]} (rank {self.rank}). Leave the context first."
            )

    @contextmanager
    def replacing_values(self, context: str, values: str) -> Iterator[None]:
        """Inside, masters hold other values than the trained ones: optimizers and backwards refuse the model.

        Args:
            context: What the program calls, for the messages.
            values: What the masters hold, for the messages: ``averages``.
        """
        with replacing_values(self._root, context, values):
            yield

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Inside, whole weights are handed out: nothing may change masters or begin a step.

        Raises:
            StateError: as ``refuse_inside_step``.
        """
        root = self._root
        self.refuse_inside_step("stream()")
        root.phase = Phase.STREAM
        try:
            with replacing_values(root, "polyshard.stream()", "weights unchanged until all are handed out"):
                yield
        finally:
            root.phase = Phase.IDLE if root.recorder.failure is None else Phase.FAILED

    def gather_together(self, units: Sequence[tuple[ShardedUnit, torch.dtype, Collectives | None]]) -> WholeFlats:
        """Issue gathers of whole masters: one communication for all units that have the same ranks.

        Args:
            units: At least one, each with the dtype in which it travels, and its ``shard`` or what ``gathers_to`` made
                of that. Every rank of a unit calls it. What arrives is memory of its own.
        """
        names = ", ".join(f"'{unit.name}'" for unit, *_ in units)
        with self.meeting(f"gather of whole {names}", dict.fromkeys(among for *_, among in units)):
            return WholeGather([(unit._unit, unit.master, dtype, among) for unit, dtype, among in units])

    def gather_stored(self, unit: ShardedUnit, wanted: Sequence[ShardedParameter]) -> list[torch.Tensor]:
        """Whole tensors of ``wanted``, some of what ``unit.stored`` has, where its parameters gather themselves.

        Every rank of the unit calls it. What arrives is memory of its own.
        """
        inner = unit._unit
        assert isinstance(inner, ExtendedUnit)
        with self.meeting(f"gather of whole '{unit.name}'", (unit.shard,)):
            return [gather_inner(inner, each.slot.segment, each.inner) for each in wanted if each.inner is not None]

    def copy_into_masters(self, values: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """Copy ``values`` into ``places``, masters or parameters, behind everything that still reads these."""
        root = self._root
        # A gather that no forward waited for may still read, and the host writes what is parked beside the device.
        root.streams.drain()
        if root.streams.here() is not None and any(unit.parks for unit in root.units):
            torch.cuda.synchronize(root.collectives.device)
        with torch.no_grad():
            for value, place in zip(values, places, strict=True):
                place.copy_(value)

    @contextmanager
    def synchronising(self, synchronises: bool) -> Iterator[None]:
        """Inside, backwards reduce gradients, or keep them on this rank."""
        before, self._root.synchronises = self._root.synchronises, synchronises
        try:
            yield
        finally:
            self._root.synchronises = before

    @contextmanager
    def kept_unsharded(self) -> Iterator[None]:
        """Inside, units stay gathered behind their forward, as for many forwards without a backward."""
        units = self._root.units
        before = [unit.reshard_policy for unit in units]
        try:
            for unit in units:
                unit.reshard_policy = Reshard.NEVER
            yield
        finally:
            for unit, policy in zip(units, before, strict=True):
                unit.reshard_policy = policy

    def whole_on_this_rank(self, values: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Inside, every parameter is whole on this rank, with ``values`` by first name; nothing is communicated."""
        return whole_on_this_rank(self._root, values)

    @property
    def groups(self) -> Iterable[Collectives]:
        """All groups of ranks that it communicates over, each once."""
        return graph.groups_of(self._root)

    @property
    def warming_up(self) -> bool:
        """Whether the first steps still decide: which units stay gathered, and whether ranks issue the same."""
        return self._root.budget_pending

    def capture_obstacle(self) -> str | None:
        """Why no step can be recorded in a CUDA graph, alike on all ranks; None where steps can be."""
        return graph.capture_obstacle(self._root)

    def step_obstacle(self) -> str | None:
        """Why the next step cannot be recorded or replayed; None where it can."""
        if self._root.audit is not None:
            return "No warm-up step ran the model forward and backward. Let train_step do both."
        return graph.step_obstacle(self._root)

    def prepare_recording(self) -> RecordedModel:
        """Do everything that a forward does before its first operation, and release all gather buffers.

        Raises:
            ParameterChangedError: a parameter was removed, or replaced by one of another shape, dtype or device.
        """
        graph.prepare_recording(self._root)
        return graph.RecordedState(self._root)

    def release_buffers(self) -> None:
        """Take all gather buffers' memory, and order the current stream after everything that was issued."""
        graph.release_buffers(self._root)

    def recover_from_recording(self) -> None:
        """Back to the state between steps, behind a recording that failed."""
        graph.recover_from_recording(self._root)

    def begin_gathers(self) -> None:
        """Order the next gathers behind the current stream."""
        self._root.streams.begin_forward()

    def tell_saved(self, model: nn.Module, path: Path | str) -> None:
        """Call the listeners' ``on_save``."""
        self._root.events.on_save(model, path)

    def tell_loaded(self, model: nn.Module, path: Path | str) -> None:
        """Call the listeners' ``on_load``."""
        self._root.events.on_load(model, path)


class WholeFlats(Protocol):
    """Whole units on their way."""

    def wait(self) -> list[torch.Tensor]:
        """Order the current stream behind them; each unit whole (``[padded_numel]``). Called once."""


def gathers_to(receivers: Sequence[int], among: Collectives) -> Collectives:
    """Collectives of the same ranks, whose gathers reach ``receivers`` of them alone."""
    return ToSome(among, receivers)


class RecordedModel(Protocol):
    """The model as it was when a step was recorded in a CUDA graph."""

    @property
    def released(self) -> bool:
        """Whether no gather buffer has got memory since."""

    def obstacle(self) -> tuple[str, bool] | None:
        """Why the recording cannot be replayed, and whether that lasts until it is recorded anew; None where it can."""


@dataclass(frozen=True, slots=True)
class _Attached:
    """What stands above the runtime, as the runtime sees it."""

    value: EndsWithModel

    def close(self, root: Root) -> None:
        self.value.close(ShardedModel(root))


class EndsWithModel(Protocol):
    """What is kept with a model, and ends before the model's communicators do."""

    def close(self, model: ShardedModel) -> None:
        """The model is closed. Every rank calls it."""


A = TypeVar("A", bound=EndsWithModel)


class WaitingTimes:
    """Measures how long the steps of a model wait for other ranks, from its making until ``stop``."""

    def __init__(self, model: ShardedModel) -> None:
        self._streams = model._root.streams
        self._stalls = self._streams.stalls = self._streams.measure()

    @property
    def forwards(self) -> int:
        """How many forwards were measured; a CUDA graph that replays has none."""
        return self._stalls.forwards

    def stop(self) -> None:
        """Measure no more."""
        self._stalls.stop()
        self._streams.stalls = None

    def read(self) -> tuple[float, float]:
        """Seconds of all measured steps that this rank did not wait for others, and seconds altogether."""
        times = self._stalls.read()
        return times.own_s, times.wall_s


@dataclass(frozen=True, slots=True)
class LocatedParameter:
    """Where a parameter of a sharded model lies."""

    model: ShardedModel
    unit: ShardedUnit
    position: int | None
    """Which of the unit's parameters; None of a flat parameter, which stands for all of them."""
    order: tuple[int, int]
    """Of the model and of the unit: the same on every rank, whatever the order in which parameters were given."""


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` itself was sharded; not what is inside it."""
    return MODULE_STATE_ATTRIBUTE in module.__dict__


def sharded_model(module: nn.Module) -> ShardedModel | None:
    """The model that ``module`` is a sharded module of, closed or not; None where polyshard did not shard ``module``.

    Modules that a drop-in sharded are not its own: they form a model at their first forward.
    """
    state = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
    if type(state) is ModuleState or isinstance(state, GroupedState):
        return ShardedModel(root_of(state))
    return None


def units_in(model: nn.Module) -> Iterator[ShardedUnit]:
    """The units of every sharded module in ``model``, in module order."""
    for state in dict.fromkeys(module.__dict__.get(MODULE_STATE_ATTRIBUTE) for module in model.modules()):
        yield from map(ShardedUnit, () if state is None else state.units)


def refuse_unshardable(model: nn.Module, rank: int) -> None:
    """Raise where ``shard`` would refuse ``model``, without changing it.

    Raises:
        AlreadyShardedError: a module in it is sharded.
        ParameterError: a parameter cannot be sharded.
    """
    refuse_sharded(model, rank)
    refuse_unshardable_parameters(model, ignored_modules=(), ignored_parameters=(), rank=rank, extends=True)


def outermost_model(model: nn.Module, call: str) -> ShardedModel:
    """The sharded model whose outermost module is ``model``; ``call`` begins messages.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or was closed.
    """
    return ShardedModel(outermost_root(model, call))


def idle_model(model: nn.Module, call: str) -> ShardedModel:
    """``outermost_model`` between steps, with the user's changes to parameters taken over.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
        ParameterChangedError: as ``ShardedModel.adopt_changes``.
    """
    refuse_broken(model, call)
    found = outermost_model(model, call)
    found.refuse_inside_step(call)
    # All modules: nobody may take one rank's values for the model's.
    found.adopt_changes(trains=True, all_modules=True)
    return found


def savable_model(model: nn.Module, call: str) -> ShardedModel:
    """``idle_model``, for what saves or loads whole values.

    Raises:
        StateError, ParameterChangedError: as ``idle_model``.
        UnsupportedError: as ``ShardedModel.refuse_unnamed``.
    """
    found = idle_model(model, call)
    found.refuse_unnamed(call)
    return found


def savable_part(module: nn.Module, call: str) -> tuple[ShardedModel, nn.Module]:
    """The model that ``module`` is or is inside of, as ``savable_model`` gives it, and the module without a wrapper.

    Raises:
        StateError, ParameterChangedError, UnsupportedError: as ``savable_model``, and where no sharded model has it.
    """
    root, module = root_around(module, call)
    return savable_model(root.module_states[0].module, call), module


def models() -> list[ShardedModel]:
    """The sharded models of this process, in the order in which they were made."""
    return list(map(ShardedModel, live_roots.roots()))


def models_changed() -> int:
    """How many models were sharded so far. What ``find`` said before the latest may be something else now."""
    return live_roots.changes


def find(tensors: Sequence[torch.Tensor]) -> list[LocatedParameter | None]:
    """For each of ``tensors`` where it lies; None for what is no parameter of a sharded model."""
    found = live_roots.find(tensors)
    handles = {each.root: ShardedModel(each.root) for each in found if each is not None}
    return [
        each and LocatedParameter(handles[each.root], ShardedUnit(each.unit), each.slot, each.order) for each in found
    ]
