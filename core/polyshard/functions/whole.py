"""Whole parameters in full precision, outside of compute, and state dicts of modules whose parameters are sharded.

``state_dict`` of a module has its ``DTensor`` parameters. ``load_state_dict`` takes these, and whole tensors, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import ParameterChangedError, StateError, UnsupportedError, warn_once
from ..interfaces import Collectives, CollectivesDecorator, Observer, PrecisionPlugin, UnitSpec, Work
from ..planning.extensions import InnerTensor, own_rows, rows_of
from ..planning.groups import UnitRanks
from ..planning.parts import is_dtensor, local_of
from ..planning.plan import ManagedParameter
from ..runtime.buffers import FlatBuffer, piece_in, shard_in, slices_of, view_of
from ..runtime.extended import ExtendedUnit
from ..runtime.gather import Source, Then, start_gathers
from ..runtime.parameters import become
from ..runtime.placed import PlacedUnit, keep_attributes
from ..runtime.root import Root
from ..runtime.states import Phase
from ..runtime.unit import Unit


@contextmanager
def unsharded_parameters(root: Root, module: nn.Module, *, writeback: bool) -> Iterator[None]:
    """Inside, every original in ``module``, and all others of the same units, have their whole shape and master dtype;
    on leaving, own elements go back where asked. ``module``: the outermost, or one inside it.

    Modules that are called inside compute with the originals as they are, without collectives. A backward through that
    raises ``StateError``.

    Raises:
        StateError: inside a forward or backward, or when entered twice.
        UnsupportedError: as ``refuse_flat_parameters``, or it cannot be told what a parameter is made of.
        ParameterChangedError: on leaving, what is to be kept has another shape, or was tied to another parameter.
    """
    root.leave_failed_backward()
    root.refuse_open_stream("unsharded()")
    if root.phase is not Phase.IDLE:
        raise StateError(
            f"Cannot manually unshard parameters during forward/backward (rank {root.rank}, phase {root.phase.value}). "
            "Leave the forward or backward first."
        )
    if root.unsharded:
        raise StateError(
            f"Cannot manually unshard parameters when already unsharding parameters (rank {root.rank}). "
            "Use the context that is open."
        )
    units = units_within(root, module)
    for unit in units:
        if isinstance(unit, ExtendedUnit):
            unit.held.require_insides("unsharded()")
    refuse_flat_parameters(units, "unsharded()")
    root.adopt_changes(trains=False)
    root.outdate()
    root.unsharded, root.drops_writes = frozenset(units), not writeback
    flats: dict[Unit, torch.Tensor] = {}
    refusals = ExitStack()
    try:
        for unit in units:
            with root.meeting(f"gather of whole '{unit.spec.label}'", (unit.ranks.owner,)):
                flats[unit] = _expose_whole(unit)
            for parameter in unit.parameters:
                site, key = parameter.sites[0]
                shown = site._parameters[key]
                if shown is not None and shown.requires_grad:
                    hook = partial(_refuse_gradient, shown, parameter.names[0], root.rank)
                    refusals.enter_context(shown.register_hook(hook))  # type: ignore[no-untyped-call]
        yield
        if writeback:
            if root.registrations is not None and root.registered:
                root.registrations.refuse_ties()
            for unit, flat in flats.items():
                if isinstance(unit, ExtendedUnit):
                    _write_back_inner(unit)
                else:
                    write_back(unit, flat)
        _take_trained(flats)
    finally:
        refusals.close()
        _show_originals(flats)
        root.unsharded = ()


def refuse_flat_parameters(units: Iterable[Unit], call: str) -> None:
    """Raise where modules have a flat parameter in the place of their own: FSDP's ``use_orig_params=False``.

    Raises UnsupportedError: naming a parameter; ``call`` begins the message.
    """
    for unit in units:
        for parameter in unit.parameters:
            site, key = parameter.sites[0]
            if key not in site._parameters:
                raise UnsupportedError(
                    f"{call}: the module of '{parameter.names[0]}' has a flat parameter in its place (rank "
                    f"{unit.ranks.world.rank}). Use the wrapper's own summon_full_params, state_dict and "
                    "optim_state_dict, or wrap with use_orig_params=True."
                )


def units_within(root: Root, module: nn.Module) -> Sequence[Unit]:
    """The units that have a parameter in ``module``, in module order."""
    if module is root.module_states[0].module:
        return root.units
    inside = set(module.modules())
    return [unit for unit in root.units if any(site in inside for each in unit.parameters for site, _ in each.sites)]


@contextmanager
def whole_on_this_rank(root: Root, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, every original has its whole shape on this rank, without a word to others: for what reads a model that it
    is given, modules called included. Between steps alone. Changes are dropped on leaving.

    ``values``: whole tensors by the parameters' first names, on any device; not copied.
    """
    root.unsharded = frozenset(root.units)
    try:
        for unit in root.units:
            for parameter in unit.parameters:
                _show_whole(parameter, values[parameter.names[0]])
        yield
    finally:
        _show_originals(root.units)
        root.unsharded = ()


def gather_whole(unit: Unit, own: torch.Tensor) -> torch.Tensor:
    """The whole flat tensor (``[padded_numel]``) of which each rank has ``own`` (``[shard_numel]``), on the device that
    computes. All ranks of the unit call it together.

    Where nothing is cut and ``own`` is there already, ``own`` itself.
    """
    owner = unit.ranks.owner
    with torch.inference_mode(False), torch.no_grad():
        if owner is None:
            return own.to(unit.spec.device if unit.offloaded else own.device)
        whole = _whole_of(unit, own, own.dtype, owner)
        # Where it is issued: units of a drop-in have no streams before their first forward.
        for work in start_gathers([whole]):
            work.wait()
    return whole.buffer.flat


def gather_inner(unit: ExtendedUnit, index: int, inner: InnerTensor) -> torch.Tensor:
    """All of an inner tensor of parameter ``index``, in memory of its own. All ranks of the unit call it together."""
    own = next(tensor for each, tensor in unit.held.inner_of(index) if each is inner)
    owner = unit.ranks.owner
    with torch.inference_mode(False), torch.no_grad():
        if owner is None or not inner.is_cut:
            return own.clone()
        rows, ranks = unit.layout.slots[index].shape[0], owner.world_size
        each = inner.shape[0] * rows_of(rows, 0, ranks)[1] // rows
        whole = own.new_zeros((ranks * each, *inner.shape[1:]))
        mine = whole.narrow(0, owner.rank * each, each)
        mine[: own.shape[0]].copy_(own)
        if whole.numel():
            owner.all_gather(whole.view(-1).view(torch.uint8), mine.view(-1).view(torch.uint8)).wait()
        return whole[: inner.shape[0]]


class WholeGather:
    """A gather of whole units into memory of its own, on its way. All ranks of the units make it and wait for it.

    The memory is the current stream's, beside the units' gather buffers: a step finds these as they were.
    """

    def __init__(self, shards: Sequence[tuple[Unit, torch.Tensor, torch.dtype, Collectives | None]]) -> None:
        """Issue it, as one communication for each group of ranks.

        ``shards``: units of one model, what this rank has of each (``[shard_numel]``), in which dtype it travels, and
        among whom: the unit's owners, or ``ToSome`` of them.
        """
        root = shards[0][0].root
        self._streams = root.streams
        with torch.inference_mode(False), torch.no_grad():
            self._wholes = [_whole_of(*shard) for shard in shards]
            # The memory may be what compute read last.
            root.begin_gathers()
            self._streams.gather(self._wholes)

    def wait(self) -> list[torch.Tensor]:
        """Order the current stream behind it; each unit whole (``[padded_numel]``), without memory where this rank gets
        none. Called once.
        """
        with torch.inference_mode(False), torch.no_grad():
            for whole in self._wholes:
                self._streams.arrive(whole)
        return [whole.buffer.flat for whole in self._wholes]


class ToSome(CollectivesDecorator):
    """Collectives whose gathers reach some of the ranks: the others send, and need no memory for what is gathered."""

    api_version = 1

    def __init__(self, inner: Collectives, receivers: Sequence[int]) -> None:
        super().__init__(inner)
        self.receivers = receivers

    @property
    def receives(self) -> bool:
        return self.rank in self.receivers

    @override
    def around(self, inner: Collectives) -> Collectives:
        raise NotImplementedError("gathers to some ranks are among those of a unit")

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self.all_gather_many(((out, shard),))

    @override
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        """One exchange of bytes; where ``receives``, ``out`` of each pair is filled."""
        (out, own), *others = pairs
        direct = self.receives and not others
        if others or direct:
            # What lies in ``out`` would be written while it is sent.
            own = torch.cat([shard.view(torch.uint8) for _, shard in pairs])
        own = own.view(torch.uint8)
        sent = own.repeat(len(self.receivers)) if len(self.receivers) > 1 else own
        numel, ranks = own.numel(), range(self.world_size)
        arrives = numel if self.receives else 0
        received = out.view(torch.uint8) if direct else own.new_empty(self.world_size * arrives)
        sizes = [numel if rank in self.receivers else 0 for rank in ranks]
        work = self.inner.all_to_all(received, [arrives for _ in ranks], sent, sizes)

        def deliver(until_then: torch.Tensor = sent) -> None:
            if direct or not self.receives:
                return
            rows, start = received.view(self.world_size, numel), 0
            for out, shard in pairs:
                out.view(torch.uint8).view(self.world_size, shard.nbytes).copy_(rows.narrow(1, start, shard.nbytes))
                start += shard.nbytes

        return Then([deliver], work)


@dataclass(eq=False, slots=True)
class _Unobserved:
    """A unit whose gather nobody observes."""

    spec: UnitSpec
    ranks: UnitRanks
    precision: PrecisionPlugin
    observers: tuple[Observer, ...] = ()


@dataclass(eq=False, slots=True)
class _Whole:
    """A gather of one unit into memory of its own."""

    unit: _Unobserved
    buffer: FlatBuffer
    source: Source
    places: list[object] = field(default_factory=list)


def _whole_of(unit: Unit, own: torch.Tensor, dtype: torch.dtype, among: Collectives | None) -> _Whole:
    """A gather of ``own`` (``[shard_numel]``)."""
    layout, device = unit.layout, unit.spec.device
    receives = not isinstance(among, ToSome) or among.receives
    whole = torch.empty(layout.padded_numel, dtype=dtype, device=device if receives else "meta")
    buffer = FlatBuffer(whole, layout, resizable=False, rank=unit.ranks.shard_rank)
    if not receives:
        buffer.owns = slices_of(torch.empty(layout.shard_numel, dtype=dtype, device=device), layout)
        buffer.pairs = [(out, part) for (out, _), part in zip(buffer.pairs, buffer.owns, strict=True)]
    # A manager fetches masters in the dtype of compute alone, and what is encoded is close to the values.
    source = Source(among, own, None, None, slices_of(own, layout), buffer.pairs, buffer.owns)
    return _Whole(_Unobserved(unit.spec, unit.ranks, unit.precision), buffer, source)


def own_part(unit: Unit, whole: torch.Tensor) -> torch.Tensor:
    """This rank's elements (``[shard_numel]``) of ``whole`` (``[padded_numel]``): a view, or a copy of segments."""
    return shard_in(whole, unit.layout, unit.ranks.shard_rank)


def write_back(unit: Unit, whole: torch.Tensor) -> None:
    """Copy this rank's elements of ``whole``, whose views the parameters are, to the master.

    ``whole``: ``[padded_numel]``, in the master's dtype. Tensors that replaced its views are copied into it first.

    Raises ParameterChangedError: a replacement has another shape, or numbers of another kind.
    """
    with torch.no_grad():
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            module, key = parameter.sites[0]
            current = module._parameters.get(key)
            view = view_of(whole, slot.shape, slot.stride, slot.offset)
            placed = current is not None and is_dtensor(current)
            shape = parameter.part.shape if placed and parameter.part is not None else slot.shape
            if current is None or tuple(current.shape) != shape:
                got = None if current is None else tuple(current.shape)
                raise ParameterChangedError(
                    f"Cannot writeback when the parameter shape changes\nExpects {shape} but got {got} for "
                    f"'{parameter.names[0]}' on rank {unit.ranks.world.rank}. Keep the whole shape."
                )
            own = local_of(current) if placed else current
            if parameter.packed is not None and not parameter.packed.adopt(own):
                raise ParameterChangedError(
                    f"'{parameter.names[0]}', a {parameter.packed.cls.__name__}, was replaced by a "
                    f"{type(own).__name__} that does not say what its bytes mean (rank {unit.ranks.world.rank}). "
                    "Replace it by a quantized one of the same class, or leave unsharded() with writeback=False."
                )
            if _has_gradients(own.dtype) != _has_gradients(view.dtype):
                raise ParameterChangedError(
                    f"'{parameter.names[0]}' holds {view.dtype}, and was replaced by a tensor of {own.dtype} (rank "
                    f"{unit.ranks.world.rank}), whose values it cannot hold. Keep the dtype, or leave unsharded() with "
                    "writeback=False."
                )
            if own.data_ptr() != view.data_ptr():
                view.copy_(own)
        if whole.data_ptr() != unit.master.data_ptr():
            unit.master.copy_(own_part(unit, whole))


def own_rows_of(unit: PlacedUnit, index: int, whole: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's rows of ``whole``, a tensor that its unit cuts as the parameter."""
    start, stop = unit.layout.range_of(index, unit.ranks.shard_rank)
    own = whole if unit.ranks.owner is None else piece_in(whole, unit.layout.slots[index], start, stop)
    # A view would keep the whole tensor alive.
    return own.clone().view(unit.held.locals[index].shape)


def _write_back_inner(unit: ExtendedUnit) -> None:
    """As ``write_back``, of whole parameters that gather themselves.

    Raises ParameterChangedError: one is of another class or shape.
    """
    for index, parameter in enumerate(unit.parameters):
        module, key = parameter.sites[0]
        current: torch.Tensor | None = module._parameters.get(key)
        insides = parameter.insides
        assert insides is not None
        if current is None or type(current) is not insides.kind or tuple(current.shape) != insides.shape:
            got = "nothing" if current is None else f"{type(current).__name__} {tuple(current.shape)}"
            raise ParameterChangedError(
                f"'{parameter.names[0]}' was replaced by {got} on rank {unit.ranks.world.rank}, and is a "
                f"{insides.kind.__name__} {insides.shape}. Change its values in place."
            )
        with torch.no_grad():
            for inner, own in unit.held.inner_of(index):
                given = getattr(current, inner.attribute)
                own.copy_(given[slice(*inner.rows)] if inner.is_cut else given)


def _expose_whole(unit: Unit) -> torch.Tensor:
    if isinstance(unit, ExtendedUnit):
        for index, parameter in enumerate(unit.parameters):
            insides = parameter.insides
            assert insides is not None
            inner = {each.attribute: gather_inner(unit, index, each) for each in insides.inner}
            _show_whole(parameter, insides.whole(inner))
        return unit.master
    with torch.inference_mode(False), torch.no_grad():
        flat = gather_whole(unit, unit.master)
        if flat.data_ptr() == unit.master.data_ptr():
            # Without writeback, writes must not reach the master.
            flat = flat.clone()
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            view = view_of(flat, slot.shape, slot.stride, slot.offset)
            _show_whole(parameter, view if parameter.leaf is None else parameter.leaf.as_leaf(view))
    return flat


def _show_whole(parameter: ManagedParameter, whole: torch.Tensor) -> None:
    """Let modules see ``whole``: in the original itself, or in its place where one of the two is of another class."""
    original = parameter.original
    if not parameter.extended and not is_dtensor(original) and not is_dtensor(whole):
        become(original, whole)
        return
    if parameter.packed is None:
        shown: Any = nn.Parameter(whole, requires_grad=original.requires_grad)
    else:
        shown = parameter.packed.over(whole)
    for module, key in parameter.sites:
        module._parameters[key] = shown


def _take_trained(units: Iterable[Unit]) -> None:
    """Let originals be frozen and trained as modules' whole parameters are: users change it on these."""
    for unit in units:
        for parameter in unit.parameters:
            module, key = parameter.sites[0]
            shown, original = module._parameters.get(key), parameter.original
            if shown is not None and parameter.packed is None and _has_gradients(original.dtype):
                original.requires_grad_(shown.requires_grad)


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _show_originals(units: Iterable[Unit]) -> None:
    for unit in units:
        for parameter in unit.parameters:
            if parameter.packed is not None:
                # Merged adapters leave them otherwise.
                parameter.packed.restore()
                keep_attributes(parameter.original, parameter.packed.attributes)
            for module, key in parameter.sites:
                # A removed parameter stays removed: the next forward raises for it.
                if key in module._parameters:
                    module._parameters[key] = parameter.original
        unit.held.expose()


def _refuse_gradient(parameter: torch.Tensor, name: str, rank: int, _: torch.Tensor) -> None:
    # Modules without a unit, and plain uses of a parameter, have no output that a module state watches.
    if _torch_private.will_accumulate(parameter):
        raise StateError(
            f"A backward inside unsharded() on rank {rank} reached '{name}': its gradient would be whole "
            "and this rank's alone. Run forward and backward outside of unsharded(), or use "
            "torch.autograd.grad."
        )


def load_whole_values(units: Iterable[Unit]) -> None:
    """Let ``load_state_dict`` of the modules that hold parameters of ``units`` take whole tensors as they are saved."""
    for unit in units:
        if unit.answers_state_dicts or not isinstance(unit, PlacedUnit):
            continue
        slots: dict[nn.Module, dict[str, int]] = {}
        for index, parameter in enumerate(unit.parameters):
            for module, key in parameter.sites:
                slots.setdefault(module, {})[key] = index
        for module, held in slots.items():
            module.register_load_state_dict_pre_hook(_WholeValues(unit, held).before_load)  # type: ignore[no-untyped-call]


@dataclass(eq=False, slots=True)
class _WholeValues:
    """A hook of one module, for its parameters of one unit."""

    unit: PlacedUnit
    slots: Mapping[str, int]

    def before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Let each value in ``state_dict``, which is ``load_state_dict``'s own, lie as the parameter does."""
        for key, index in self.slots.items():
            value: Any = state_dict.get(prefix + key)
            # Torch raises for other values.
            if isinstance(value, torch.Tensor):
                state_dict[prefix + key] = self._shown(index, value) if self._shows_whole else self._own(index, value)

    def _shown(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """``value`` as modules hold parameters while these are whole."""
        self._warn_of_lost_values(index)
        part = self.unit.parameters[index].part
        if part is None:
            return value.detach().full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined]
        if not is_dtensor(value) and tuple(value.shape) == part.shape:
            return part.as_leaf(part.cut(value.detach()).contiguous())
        return value

    def _own(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """``value`` as modules hold parameters outside of compute: this rank's part of it.

        Raises StateError: it has another shape.
        """
        unit, parameter = self.unit, self.unit.parameters[index]
        part = parameter.part
        held: Any = parameter.original
        if is_dtensor(value):
            placed: Any = value
            if placed.device_mesh == held.device_mesh and placed.placements == held.placements:
                return value
            # All ranks pass here.
            value = placed.detach().full_tensor()
        shape = unit.layout.slots[index].shape if part is None else part.shape
        if tuple(value.shape) != shape:
            raise StateError(
                f"load_state_dict() got '{parameter.names[0]}' in shape {tuple(value.shape)}, and the whole parameter "
                f"has {shape} (rank {self._rank}). Give whole parameters, which each rank takes its part of, or "
                "DTensors."
            )
        if parameter.extended:
            return unit.held.placed(index, self._rows_of(index, value))
        whole = value.detach() if part is None else part.cut(value.detach())
        return unit.held.placed(index, own_rows_of(unit, index, whole))

    def _warn_of_lost_values(self, index: int) -> None:
        if self.unit.root.unsharded and self.unit.root.drops_writes:
            warn_once(
                f"load_state_dict() inside of polyshard.unsharded() gives '{self.unit.parameters[index].names[0]}' and "
                "others values that are dropped where the context ends. Enter unsharded(model, writeback=True) to keep "
                "them.",
                rank=self._rank,
            )

    def _rows_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``value``, a whole parameter that gathers itself.

        Raises StateError: it is of another class, in whose values ranks would make something else of each.
        """
        parameter, ranks = self.unit.parameters[index], self.unit.ranks
        insides, kind = parameter.insides, type(self.unit.held.locals[index])
        fits = type(value) is kind or (insides is not None and type(value) is insides.kind)
        if insides is not None and insides.is_plain:
            fits = fits or type(value) in (torch.Tensor, nn.Parameter)
        if not fits:
            raise StateError(
                f"load_state_dict() got '{parameter.names[0]}' as {type(value).__name__}, and the whole parameter is a "
                f"{kind.__name__} (rank {self._rank}). Give that, of which each rank takes its rows."
            )
        return own_rows(value.detach(), ranks.shard_rank, ranks.shard_size)

    # A module that is copied or pickled by itself may not take the model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeValues:
        return self

    @override
    def __reduce__(self) -> tuple[type[_NoValues], tuple[()]]:
        return _NoValues, ()

    @property
    def _shows_whole(self) -> bool:
        return self.unit in self.unit.root.unsharded

    @property
    def _rank(self) -> int:
        return self.unit.ranks.world.rank


class _NoValues:
    """Stands for ``_WholeValues`` where its module was pickled by itself."""

    def before_load(self, *_: Any) -> None:
        """Let every value through."""
