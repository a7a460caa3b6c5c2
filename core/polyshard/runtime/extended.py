"""Units of parameters that gather themselves (``planning/extensions.py``), and the memory in which they arrive.

Each tensor that a parameter sends is a *lane*: memory of its own, in the dtype of what is sent, in which the slices of
all ranks lie one behind the other. Lanes travel as bytes, beside those of other units, in one communication; nothing is
cast, and nothing copied behind the gather. The parameter that computes is made once, over the lanes or out of them.
Later gathers fill the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import (
    ParameterError,
    PolyshardError,
    UnsupportedError,
)
from ..planning.extensions import (
    ExtensionArguments,
    InnerTensor,
    arity,
    inner_tensors,
    own_rows,
    refuse_untrainable,
)
from ..planning.layout import contiguous_stride, product
from ..planning.parts import is_dtensor
from ..planning.plan import ManagedParameter
from .buffers import FlatBuffer
from .gathered import GatheredParameters
from .parameters import Shown
from .placed import PlacedParameters, PlacedUnit

_is_meta = attrgetter("is_meta")


class ExtendedUnit(PlacedUnit):
    """Parameters that gather themselves. There is no flat master: each rank has tensors of the parameters' classes.

    Gradients are plain, and are reduced and delivered as those of other units.
    """

    held: ExtendedParameters
    gathered: LaneParameters
    extended = True
    writes_gradients_directly = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: What the parameters' methods are given; told while names are those in the module.
        self.arguments = self.placed.extension_arguments(self.parameters[0], self.spec.master_dtype, self.dtypes)

    @override
    def _make_held(self) -> ExtendedParameters:
        return ExtendedParameters(self, getattr(self, "held", None))

    @override
    def _make_gathered(self, keeps_buffer: bool) -> LaneParameters:
        return LaneParameters(self, keeps_buffer=keeps_buffer)


class ExtendedParameters(PlacedParameters):
    """``DTensor`` parameters whose local tensors are of the classes that the program gave."""

    @property
    def own(self) -> Sequence[torch.Tensor]:
        """The local tensors."""
        return self._views

    @property
    @override
    def nbytes(self) -> int:
        return sum(inner.nbytes for own in self.own for inner in inner_tensors(own))

    @property
    @override
    def lacks_values(self) -> bool:
        return any(map(_is_meta, self.own))

    def require_insides(self, call: str) -> None:
        """Raise where the values of a parameter cannot be told by plain tensors; ``call`` begins the message.

        Raises UnsupportedError: naming the parameter, its class and the reason.
        """
        for parameter, own in zip(self._unit.parameters, self.own, strict=True):
            found = parameter.insides
            if found is None or found.fault:
                fault = "is of an unknown class" if found is None else found.fault
                raise UnsupportedError(
                    f"{call}: '{parameter.names[0]}', a {type(own).__name__}, {fault} (rank "
                    f"{self._unit.ranks.world.rank}). Save model.state_dict() on each rank, for the same number of "
                    "ranks."
                )

    def inner_of(self, index: int) -> Iterator[tuple[InnerTensor, torch.Tensor]]:
        """What parameter ``index`` is made of, and this rank's part of that."""
        found = self._unit.parameters[index].insides
        for each in () if found is None else found.inner:
            yield each, getattr(self.own[index], each.attribute).detach()

    @override
    def _part(self, index: int) -> torch.Tensor:
        unit, original = self._unit, self._unit.parameters[index].original
        if is_dtensor(original):
            return _torch_private.local_tensor(original)
        parameter = unit.parameters[index]
        # Of one that was initialised from the meta device they are there.
        rows, parameter.rows = parameter.rows, None
        if rows is None:
            return _cut(parameter, unit.ranks.shard_rank, unit.layout.world_size, unit.spec.device)
        return rows

    @override
    def retrained(self) -> bool:
        before = self._trained
        changed = super().retrained()
        if changed:
            for parameter, own, now, was in zip(self._unit.parameters, self.own, self._trained, before, strict=True):
                if now and not was:
                    where = f"'{parameter.names[0]}' on rank {self._unit.ranks.world.rank}"
                    refuse_untrainable(own_rows(own.detach(), 0, 1), where)
        return changed

    @override
    def expose(self) -> None:
        before, self._views = self._views, [self._part(index) for index in range(len(self.tensors))]
        for index, (placed, view) in enumerate(zip(self.tensors, self._views, strict=True)):
            if (before and view is not before[index]) or self.locals[index].dtype != view.dtype:
                # Its data cannot be exchanged: there is no memory but that of the tensors inside.
                self.locals[index] = nn.Parameter(view, requires_grad=placed.requires_grad)

    @override
    def _take_values(self, found: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        unit = self._unit
        if dtype != unit.master.dtype:
            self.rehome(torch.empty_like(unit.master, dtype=dtype))
        else:
            self.expose()


class LaneParameters(GatheredParameters):
    """Whole parameters that are made of lanes: of the classes that the program gave, once the first gather arrived."""

    unit: ExtendedUnit
    buffer: LaneBuffer

    @override
    def _make_buffer(self, dtype: torch.dtype) -> LaneBuffer:
        return LaneBuffer(self.unit, dtype)

    @override
    def _with_versions(self) -> list[torch.Tensor]:
        return list(self.leaves)

    @property
    @override
    def nbytes(self) -> int:
        """Of lanes, and of what is made out of them; before the first gather, as if they were in compute dtype."""
        return (self.prepared and self.buffer.nbytes) or super().nbytes

    @override
    def _arrived(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        whole = torch.cat([out for out, _ in self.buffer.pairs]) if self.buffer.pairs else torch.empty(0)
        return whole, whole, None

    def become(self, leaves: Sequence[torch.Tensor]) -> None:
        """Compute with ``leaves``, which the first gather made, from now on."""
        self.bindings.show(Shown.ORIGINALS)
        self.buffer.views[:] = leaves
        self.bind(self.buffer)

    @override
    def take_gradients(self) -> list[torch.Tensor | None]:
        return [gradient if gradient is None else _plain(gradient) for gradient in super().take_gradients()]


def _cut(parameter: ManagedParameter, rank: int, ranks: int, device: torch.device) -> torch.Tensor:
    """The rows of the whole ``parameter`` that ``rank`` of ``ranks`` has, on ``device`` unless on the meta device."""
    whole = parameter.original.detach()
    if not whole.is_meta and whole.device != device:
        whole = whole.to(device)
        if parameter.insides is not None:
            parameter.insides = parameter.insides.seen_on(whole)
    return own_rows(whole, rank, ranks)


class LaneBuffer(FlatBuffer):
    """The lanes of one unit, and the parameters made out of them.

    Until the first gather ``views`` are on the meta device: their number, and what they are, is the parameters' to say.
    """

    def __init__(self, unit: ExtendedUnit, dtype: torch.dtype) -> None:
        layout = unit.layout
        with torch.inference_mode(False):
            super().__init__(torch.empty(layout.padded_numel, dtype=dtype, device="meta"), layout, resizable=True)
        self.device = unit.spec.device
        #: Lanes are gathered like segments, several in one communication.
        self.divided = True
        self.behind = [self._arrive]
        self.owns, self.pairs = [], []
        self.nbytes, self.attached = 0, False
        self._unit = unit
        # Whether ranks know what all of them send.
        self._met = False
        self._parameters = [
            _Extended(parameter, slot.shape, unit.arguments, dtype, unit.ranks.world.rank)
            for parameter, slot in zip(unit.parameters, layout.slots, strict=True)
        ]
        self._storages = []

    @override
    def attach(self) -> None:
        """Ask the parameters what they send, and bring that together, on the current stream."""
        # What fails halfway is released.
        self.attached = True
        with torch.inference_mode(False), torch.no_grad():
            if not self._met:
                self._meet()
                self._met = True
            else:
                self._take_memory()
                for parameter, own in zip(self._parameters, self._unit.held.own, strict=True):
                    parameter.send(own)

    @override
    def holds(self, tensor: torch.Tensor) -> bool:
        if not self.attached or tensor.is_meta:
            return False
        starts = {storage.data_ptr() for storage, _ in self._storages}
        return any(inner.untyped_storage().data_ptr() in starts for inner in inner_tensors(tensor) if inner.numel())

    def _meet(self) -> None:
        """The first gather: ranks tell each other what they send, so that all know how much to expect.

        Raises:
            ParameterError: on every rank alike, where a parameter of any of them failed, or sends what others do not.
        """
        own = self._unit.held.own
        answers = [parameter.ask_first(tensor) for parameter, tensor in zip(self._parameters, own, strict=True)]
        group = self._unit.ranks.gather
        everyone: list[Any] = [answers]
        if group is not None and group.capabilities.can_communicate:
            everyone = group.all_gather_object(answers)
        ranks, rank = (group.world_size, group.rank) if group is not None else (1, 0)
        for index, parameter in enumerate(self._parameters):
            parameter.agree([each[index] for each in everyone])
        self.pairs.clear()
        self._storages.clear()
        for parameter in self._parameters:
            parameter.make_lanes(ranks, rank, self.device)
            self._remember([lane.whole for lane in parameter.lanes])
            # What has no bytes is not sent.
            self.pairs += [lane.pair for lane in parameter.lanes if lane.whole.numel()]

    def _arrive(self) -> None:
        """Behind the gather, on the stream that waits for it: make the parameters, or fill them anew."""
        unit = self._unit
        with torch.inference_mode(False), torch.no_grad():
            new = [parameter.receive(own) for parameter, own in zip(self._parameters, unit.held.own, strict=True)]
        if any(new):
            for parameter in self._parameters:
                self._remember(parameter.inner)
            unit.gathered.become([parameter.leaf for parameter in self._parameters if parameter.leaf is not None])

    def _remember(self, tensors: Sequence[torch.Tensor]) -> None:
        known = {storage.data_ptr() for storage, _ in self._storages}
        for inner in (inner for tensor in tensors for inner in inner_tensors(tensor)):
            storage = inner.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                self._storages.append((storage, storage.nbytes()))
        self.nbytes = sum(nbytes for _, nbytes in self._storages)

    def _take_memory(self) -> None:
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)


class _Lane:
    """One tensor of one parameter: what every rank sends of it, in the order of ranks."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, ranks: int, rank: int, device: torch.device) -> None:
        """``shape``: of what a rank sends, padding included."""
        numel, first = product(shape), shape[0] if shape else 1
        #: ``[ranks * rows, ...]``, as the parameter receives it.
        self.whole = torch.empty((ranks * first, *shape[1:]), dtype=dtype, device=device)
        # Version counters of their own: a gather between forward and backward is no change of what autograd saved.
        flat = self.whole.view(-1).data
        own = flat.narrow(0, rank * numel, numel)
        #: What a gather fills, and this rank's part of it.
        self.pair = (flat.view(torch.uint8), own.view(torch.uint8)) if numel else (flat, own)
        self._place = own.view(tuple(shape))

    def fill(self, own: torch.Tensor) -> None:
        """Copy what this rank sends, bit for bit, and zeros behind it."""
        if own.shape == self._place.shape:
            self._place.copy_(own)
            return
        rows = own.size(0)
        self._place[:rows].copy_(own)
        self._place[rows:].zero_()


class _Extended:
    """One parameter: what it sends, and what it makes of what arrives."""

    def __init__(
        self,
        parameter: ManagedParameter,
        shape: tuple[int, ...],
        arguments: ExtensionArguments,
        dtype: torch.dtype,
        rank: int,
    ) -> None:
        self.lanes: list[_Lane] = []
        #: The parameter that computes; None before the first gather.
        self.leaf: nn.Parameter | None = None
        #: Tensors whose memory lives as long as the whole parameter.
        self.inner: tuple[torch.Tensor, ...] = ()
        self._parameter = parameter
        self._shape = torch.Size(shape)
        self._arguments = arguments
        self._dtype = dtype
        self._rank = rank
        self._arity = 0
        self._metadata: Any = None
        self._first: list[torch.Tensor] = []
        self._failure: Exception | None = None
        # Shape and dtype of each lane, without padding and with.
        self._sent: list[tuple[torch.Size, torch.dtype]] = []
        self._shapes: list[tuple[int, ...]] = []

    def ask_first(self, own: torch.Tensor) -> list[Any] | str:
        """What this rank sends, as others are told: shape and dtype of each tensor; or why it failed."""
        try:
            self._first = self._ask(own)
        except Exception as error:
            self._failure = error
            return f"{type(error).__name__}: {error}"
        self._sent = [(each.shape, each.dtype) for each in self._first]
        return [[tuple(each.shape), str(each.dtype)] for each in self._first]

    def agree(self, everyone: Sequence[list[Any] | str]) -> None:
        """Take over the sizes of what the first rank sends, which has the most rows; others' are padded to these.

        Raises ParameterError: a rank failed, or sends what does not fit.
        """
        failed = {rank: each for rank, each in enumerate(everyone) if isinstance(each, str)}
        if failed:
            ranks, reason = list(failed), next(iter(failed.values()))
            raise ParameterError(
                f"fsdp_pre_all_gather of {self._where} failed on ranks {ranks} of its unit: {reason}"
            ) from self._failure
        sent = [each for each in everyone if not isinstance(each, str)]
        first = sent[0]
        for rank, each in enumerate(sent):
            if not _fits(each, first):
                raise ParameterError(
                    f"fsdp_pre_all_gather of {self._where} answered {each} on rank {rank} of its unit and {first} on "
                    "rank 0. Answer as many tensors on all ranks, of the same dtypes, whose sizes differ in dimension "
                    "0 alone and are no larger there than on rank 0."
                )
        self._shapes = [tuple(shape) for shape, _ in first]

    def make_lanes(self, ranks: int, rank: int, device: torch.device) -> None:
        """Take memory for what all ranks send, and bring this rank's part there."""
        dtypes = [dtype for _, dtype in self._sent]
        self.lanes = [
            _Lane(shape, dtype, ranks, rank, device) for shape, dtype in zip(self._shapes, dtypes, strict=True)
        ]
        first, self._first = self._first, []
        for lane, each in zip(self.lanes, first, strict=True):
            lane.fill(each)

    def send(self, own: torch.Tensor) -> None:
        """Bring this rank's part together once more.

        Raises ParameterError: it sends another number of tensors, or of other sizes or dtypes, than the first time.
        """
        with self._named("fsdp_pre_all_gather"):
            inputs = self._ask(own)
        sent = [(each.shape, each.dtype) for each in inputs]
        if sent != self._sent:
            raise ParameterError(
                f"fsdp_pre_all_gather of {self._where} answered {sent}, and {self._sent} before. Answer tensors of the "
                "same shapes and dtypes in every step: other ranks expect as many bytes."
            )
        for lane, each in zip(self.lanes, inputs, strict=True):
            lane.fill(each)

    def receive(self, own: torch.Tensor) -> bool:
        """Make the parameter of what arrived, or fill it anew; returns whether it was made.

        Raises ParameterError: the parameter's method failed, or answered no tensor of the parameter's shape.
        """
        outputs, post = tuple(lane.whole for lane in self.lanes), own.fsdp_post_all_gather  # type: ignore[attr-defined]
        metadata, self._metadata = self._metadata, None
        if self.leaf is not None:
            with self._named("fsdp_post_all_gather"):
                post(outputs, metadata, self._dtype, out=self.leaf)
            return False
        with self._named("fsdp_post_all_gather"):
            answer: Any = post(outputs, metadata, self._dtype)
            if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], torch.Tensor):
                raise TypeError(f"it answered {answer!r}; answer the whole tensor, and a tuple of those to be released")
            whole, inner = answer
            if whole.shape != self._shape:
                # Padding at the end.
                whole = torch.as_strided(whole, self._shape, contiguous_stride(self._shape), 0)
        self.inner = tuple(inner)
        self.leaf = nn.Parameter(whole, requires_grad=False)
        return True

    def _ask(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._arity = self._arity or arity(own)
        call: Any = own.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arguments = self._arguments
        if self._arity == 1:
            answer = call(arguments.mesh)
        else:
            module = self._parameter.sites[0][0]
            answer = call(arguments.mesh, self._shape, contiguous_stride(self._shape), module, arguments.policy)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"it answered {answer!r}; answer a tuple of tensors, and metadata")
        inputs, self._metadata = answer
        if not isinstance(inputs, tuple | list) or not all(isinstance(each, torch.Tensor) for each in inputs):
            raise TypeError(f"it answered {inputs!r} as what is gathered; answer a tuple of tensors")
        return list(inputs)

    @property
    def _where(self) -> str:
        return f"'{self._parameter.names[0]}' (rank {self._rank})"

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except PolyshardError:
            raise
        except Exception as error:
            raise ParameterError(f"{method} of {self._where} failed: {type(error).__name__}: {error}") from error


def _fits(own: list[Any], first: list[Any]) -> bool:
    return len(own) == len(first) and all(
        dtype == first_dtype
        and len(shape) == len(first_shape)
        and tuple(shape[1:]) == tuple(first_shape[1:])
        and tuple(shape[:1]) <= tuple(first_shape[:1])
        for (shape, dtype), (first_shape, first_dtype) in zip(own, first, strict=True)
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or its values where it is of a class of its own, as gradients may be."""
    if type(tensor) is torch.Tensor:
        return tensor
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
