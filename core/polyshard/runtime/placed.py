"""A unit with ``DTensor`` parameters: outside of compute they and their gradients are this rank's part of a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import DeviceError, ParameterChangedError, ParameterMovedError, StateError
from ..interfaces import UnitDtypes
from ..planning.answers import dtypes_of
from ..planning.extensions import ExtensionArguments
from ..planning.parts import is_dtensor
from ..planning.plan import ManagedParameter
from .live_roots import live_roots
from .parameters import FlatParameter, GradientTarget, HeldParameters, Shown, part_of_master
from .replaced import replaced_parameters
from .states import Fresh
from .unit import Unit

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_is_trained = attrgetter("requires_grad")
_address_of = torch.Tensor.data_ptr


class Placements(Protocol):
    """How the parameters of a unit lie."""

    @property
    def called(self) -> str:
        """What messages call them."""

    @property
    def answers_state_dicts(self) -> bool:
        """Whether a drop-in makes state dicts of its modules and of optimizers."""

    @property
    def keeps_whole(self) -> bool:
        """Whether modules hold whole parameters where these stay behind forward, until backward or ``reshard()``."""

    def spec_of(self, parameter: ManagedParameter, whole: torch.Tensor) -> Any:
        """The ``DTensorSpec`` of ``parameter``, whose names are still those in the module.

        ``whole``: of its shape and strides, those of its local tensor where tensor parallelism cut it before.
        """

    def flat_spec(self, numel: int, dtype: torch.dtype) -> Any:
        """The ``DTensorSpec`` of all masters, one behind the other: ``[numel]``."""

    def extension_arguments(
        self, parameter: ManagedParameter, kept: torch.dtype, dtypes: UnitDtypes
    ) -> ExtensionArguments:
        """What the unit of ``parameter``, which gathers itself, is given. ``kept``: the dtype of its master."""


class PlacedUnit(Unit):
    """A unit whose parameters are ``DTensor``."""

    held: PlacedParameters

    def __init__(self, *args: Any, placed: Placements, **kwargs: Any) -> None:
        self.placed = placed
        self.answers_state_dicts, self.keeps_whole = placed.answers_state_dicts, placed.keeps_whole
        super().__init__(*args, **kwargs)

    @override
    def _make_held(self) -> PlacedParameters:
        return PlacedParameters(self, getattr(self, "held", None))


class PlacedParameters(HeldParameters):
    """The parameters of one unit: ``DTensor`` for modules and optimizers, and plain ones over the same memory.

    What a user sees of them:

    - Outside of compute modules hold ``DTensor`` parameters over this rank's elements, whose gradients are ``DTensor``.
      Other modules' forwards see these too.
    - Parameters may be on the meta device, and be moved and cast, until the first forward.
    """

    _unit: PlacedUnit
    _addresses: Sequence[int] = ()

    def __init__(self, unit: PlacedUnit, before: PlacedParameters | None) -> None:
        """``before``: those over the master of before; None where there is none."""
        super().__init__(unit)
        #: Whether the parameters are not where they belong: asked in each forward.
        self.is_elsewhere = unit.master.device != self.belongs_on
        self._dtensor = _torch_private.dtensor_maker()
        self._pieces = {piece.slot: piece for piece in unit.pieces}
        self._views: list[torch.Tensor] = []
        #: Plain parameters over this rank's elements, ``(rows, ...)``.
        self.locals: list[nn.Parameter] = []
        for index, parameter in enumerate(unit.parameters):
            view = self._part(index)
            original = parameter.original
            if before is not None:
                self.locals.append(before.locals[index])
                local = _torch_private.local_tensor(original)
                if local is not view and not view.is_meta:
                    view.copy_(local.detach())
            else:
                self.locals.append(nn.Parameter(view, requires_grad=original.requires_grad))
                self._replace(index, parameter, view)
        self.tensors = [parameter.original for parameter in unit.parameters]
        self._find_sites()
        self.expose()
        self._trained = self.trained

    def _replace(self, index: int, parameter: ManagedParameter, view: torch.Tensor) -> None:
        """Put a ``DTensor`` over ``view`` into the place of the user's parameter."""
        unit, slot = self._unit, self._unit.layout.slots[index]
        holder, name = parameter.sites[0]
        # For a part of a larger tensor, parameter.original is another one.
        before = holder._parameters[name]
        assert before is not None
        whole = torch.empty_strided(slot.shape, slot.stride, dtype=view.dtype, device="meta")
        spec = unit.placed.spec_of(parameter, whole)
        placed = _torch_private.dtensor_parameter(view, spec, requires_grad=before.requires_grad)
        # What a parameter that gathers itself is made of would stay whole.
        whole_ones = [key for key, value in vars(before).items() if isinstance(value, torch.Tensor)]
        keep_attributes(placed, vars(before), whole_ones if parameter.extended else ())
        _torch_private.share_post_accumulate_grad_hooks(before, placed)
        named = [(before, parameter.names[0])]
        rank = f"rank {unit.ranks.world.rank}"
        # Drop-ins have arguments of their own.
        instead = "" if unit.answers_state_dicts else ", or give it to that: shard(..., optimizers=[...])"
        replaced_parameters.add(named, "a DTensor of this rank's part", rank, instead)
        parameter.original = placed
        for module, key in parameter.sites:
            module._parameters[key] = placed

    @cached_property
    def _specs(self) -> list[Any]:
        return [placed._spec for placed in self.tensors]  # type: ignore[attr-defined]

    def _find_sites(self) -> None:
        sites = [(slot, *site) for slot, each in enumerate(self._unit.parameters) for site in each.sites]
        # One of each for every place in which a module holds a parameter.
        self._slots = [slot for slot, _, _ in sites]
        self._holders: list[dict[str, Any]] = [module._parameters for _, module, _ in sites]
        self._keys = [key for _, _, key in sites]
        self._held = [self._unit.parameters[slot].original for slot in self._slots]
        self.__dict__.pop("_specs", None)

    def _part(self, index: int) -> torch.Tensor:
        unit = self._unit
        slot, piece = unit.layout.slots[index], self._pieces.get(index)
        part = part_of_master(unit.master, slot, piece, whole=unit.ranks.owner is None)
        return _torch_private.over_own_storage(part)

    @override
    def placed(self, index: int | None, local: torch.Tensor) -> DTensor:
        """The whole of which ``local`` is this rank's part, placed as the parameter at ``index``; None: a flat one."""
        flat = self.flat
        return self._dtensor(local, flat.spec if index is None and flat is not None else self._specs[index or 0])

    @override
    def use_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        unit = self._unit
        whole = [(leaf, each.names[0]) for leaf, each in zip(leaves, unit.parameters, strict=True)]
        rank = f"rank {unit.ranks.world.rank}"
        replaced_parameters.add(whole, "a DTensor of this rank's part", rank, ", and behind reshard()")
        super().use_leaves(leaves)

    @override
    def local(self, slot: int) -> nn.Parameter:
        return self.locals[slot]

    @override
    def flatten(self) -> list[nn.Parameter]:
        """One 1-D parameter over the whole master; the parameters themselves where some are parts of larger tensors.

        Gradients arrive there from now on.

        Raises StateError: a parameter has a gradient already, or only some of them are trained.
        """
        unit = self._unit
        if any(each.part is not None for each in unit.parameters):
            # No placement tells which of its elements other ranks of their mesh have, too.
            return list(self.tensors)
        if self.flat is None:
            self.require_values("flat_parameters()")
            numel = unit.layout.shard_numel * unit.layout.world_size
            spec = unit.placed.flat_spec(numel, unit.master.dtype)
            self.flat = FlatParameter(self, unit.master, spec, self.placed, self._name_of)
            unit.take_gradient_dtype([self.flat.parameter])
            unit.gradients.set_targets([self.flat.gradient_target])
        return [self.flat.parameter]

    def _name_of(self, slot: int | None) -> str:
        unit = self._unit
        what = f"unit '{unit.name}'" if slot is None else f"'{unit.parameters[slot].names[0]}'"
        return f"{what} on rank {unit.ranks.world.rank}"

    @property
    @override
    def gradient_targets(self) -> list[GradientTarget]:
        # Those without elements too: torch's functions for gradients need a DTensor on each rank.
        targets, end = [], 0
        for index, (receiver, view) in enumerate(zip(self.tensors, self._views, strict=True)):
            piece = self._pieces.get(index)
            start = end if piece is None else piece.shard_offset
            targets.append(GradientTarget(receiver, start, tuple(view.shape), view.stride(), index))
            end = start + view.numel()
        return sorted(targets, key=lambda target: target.offset)

    @property
    @override
    def trained(self) -> list[bool]:
        return list(map(_is_trained, self.tensors))

    @property
    @override
    def versions(self) -> Sequence[int]:
        # A DTensor has one of its own, which operations on it move, and that of its local tensor stays.
        flat = self.flat
        beside = () if flat is None else (flat.parameter, flat.local)
        return [each._version for each in (*self.tensors, *self._views, *self.locals, *beside)]

    @override
    def expose(self) -> None:
        with torch.inference_mode(False):
            self._views = [self._part(index) for index in range(len(self.tensors))]
            for index, (placed, view) in enumerate(zip(self.tensors, self._views, strict=True)):
                if self.locals[index].is_meta:
                    # A meta tensor refuses data of another device.
                    self.locals[index] = nn.Parameter(view, requires_grad=placed.requires_grad)
                self.locals[index].data = view
                _torch_private.use_local_tensor(placed, view)
        self._addresses = list(map(_address_of, self._views))

    @property
    def changed(self) -> bool:
        """Whether a parameter lies elsewhere than the unit put it, or modules hold another object than it put there."""
        # What hands a tensor to another process moves its storage there.
        return self.exchanged or list(map(_address_of, self._views)) != self._addresses

    @property
    def exchanged(self) -> bool:
        """Whether a parameter has another local tensor, or modules hold another object, than the unit put there."""
        # Asked in each forward and backward, mostly while modules hold the parameters.
        gathered = self._unit.gathered
        shown = self._shown if gathered.prepared and gathered.bindings.shown is Shown.VIEWS else self._held
        return not (
            all(map(is_, map(_torch_private.local_tensor, self.tensors), self._views))
            and all(map(is_, map(dict.get, self._holders, self._keys), shown))
        )

    @property
    def replaced(self) -> str | None:
        """The name of a parameter in whose place modules hold another object than the unit put there."""
        for slot, holder, key, shown in zip(self._slots, self._holders, self._keys, self._shown, strict=True):
            if holder.get(key) is not shown:
                return self._unit.parameters[slot].names[0]
        return None

    @property
    def _shown(self) -> Sequence[torch.Tensor]:
        """What the unit put into modules: parameters, or the whole ones that were gathered."""
        gathered = self._unit.gathered
        # Before the first gather there are no bindings.
        if not gathered.prepared or gathered.bindings.shown is not Shown.VIEWS:
            return self._held
        return [gathered.leaves[slot] for slot in self._slots]

    @override
    def adopt_changes(self) -> None:
        unit, gathered = self._unit, self._unit.gathered
        # As ``changed``, without a call: asked of every unit in every forward.
        if self.exchanged or list(map(_address_of, self._views)) != self._addresses:
            self.take_over()
            if unit.held is not self:
                # Over another master now.
                unit.held.adopt_changes()
                return
        if unit.keeps_whole:
            if gathered.held_versions is not None:
                gathered.refuse_lost_writes()
            gathered.conceal()
        elif gathered.fresh is Fresh.AHEAD:
            # Modules may hold views, which are no changes.
            gathered.conceal()
        if self.is_elsewhere:
            self.require_values("A forward")
        if self.flat is not None:
            self.flat.adopt_changes()
        if list(map(_is_trained, self.tensors)) != self._trained and self.retrained() and gathered.prepared:
            self.follow_requires_grad()

    def take_over(self) -> None:
        """Let parameters that were moved, cast, replaced or given memory since then be those of the unit.

        Raises:
            ParameterChangedError: a parameter is gone, has another shape, or lies otherwise; or some of one unit have
                another dtype or device than others; or one was replaced while it was whole.
            DeviceError: they are offloaded, and not in host memory.
        """
        unit = self._unit
        if self.changed and unit not in unit.root.unsharded:
            if unit.gathered.prepared and unit.gathered.bindings.shown is Shown.VIEWS:
                self._conceal_replaced()
            unit.retention.outdate()
            self._take_over()
            if unit.gathered.prepared:
                unit.held.follow_requires_grad()

    def _conceal_replaced(self) -> None:
        """Conceal, and raise where modules held others than the whole parameters that the unit put there.

        Raises:
            ParameterChangedError: naming one.
        """
        replaced = self.replaced
        self._unit.gathered.conceal()
        if replaced is not None:
            raise ParameterChangedError(
                f"'{replaced}' was replaced while it was whole (rank {self._unit.ranks.world.rank}), and is what it "
                "was before again. Replace it behind reshard(), by a DTensor that lies as it does."
            )

    def _take_over(self) -> None:
        unit = self._unit
        replaced = [index for index, each in enumerate(unit.parameters) if self._take_replacement(index, each)]
        for parameter in unit.parameters:
            if parameter.packed is not None:
                # Moving a module takes them from its parameters.
                keep_attributes(parameter.original, parameter.packed.attributes)
        if replaced:
            self.tensors = [parameter.original for parameter in unit.parameters]
            self._find_sites()
            self._be_found()
            if unit.root.registrations is not None:
                unit.root.registrations.parameters_replaced()
            if unit.gathered.prepared:
                unit.gathered.bind(unit.gathered.buffer)
            if self.flat is None:
                unit.gradients.set_targets(self.gradient_targets)
            else:
                self.flat.show_gradients()
        found = [_torch_private.local_tensor(placed).detach() for placed in self.tensors]
        if any(local.is_meta for local in found):
            return
        kinds = {(local.dtype, local.device): index for index, local in enumerate(found)}
        if len(kinds) > 1:
            raise ParameterChangedError(
                "Parameters of one unit were moved or cast apart (rank "
                f"{unit.ranks.world.rank}): "
                + ", ".join(
                    f"'{unit.parameters[i].names[0]}' is {dtype} on {device}" for (dtype, device), i in kinds.items()
                )
                + ". Move or cast the whole module."
            )
        ((dtype, device),) = kinds
        if unit.offloaded:
            # What offloads keeps the master where it belongs.
            self.refuse_elsewhere(device)
        with torch.no_grad():
            self._take_values(found, dtype, device)

    def _be_found(self) -> None:
        """Let functions of torch's and ours that are given the parameters find them."""
        live_roots.add(self._unit.root)

    @property
    def belongs_on(self) -> torch.device:
        """The device of the parameters between steps."""
        return torch.device("cpu") if self._unit.offloaded else self._unit.spec.device

    @property
    def lacks_values(self) -> bool:
        """Whether parameters are on the meta device."""
        return self._unit.master.is_meta

    def require_values(self, call: str) -> None:
        """Raise unless ``call`` can read the parameters.

        Raises:
            StateError: they are on the meta device.
            DeviceError: they were moved elsewhere, and not back yet.
        """
        unit = self._unit
        if self.lacks_values and unit.spec.device.type != "meta":
            names = [parameter.names[0] for parameter in unit.parameters if parameter.original.is_meta]
            raise StateError(
                f"{unit.placed.called} should be materialized from meta device before training, but the following were "
                f"still on meta device: {names}\n{call} needs their values (rank {unit.ranks.world.rank}): call "
                "to_empty(device=...) on the model, and then what initialises it, or load_state_dict(assign=True)."
            )
        self.refuse_elsewhere(_torch_private.local_tensor(self.tensors[0]).device)

    def refuse_elsewhere(self, device: torch.device) -> None:
        """Raise DeviceError unless ``device``, where the parameters are, is where they belong."""
        wanted = self.belongs_on
        if device != wanted:
            names = [(parameter.names[0], device) for parameter in self._unit.parameters]
            raise DeviceError(
                f"Found following parameters on non-{wanted.type.upper()} device: {names} (rank "
                f"{self._unit.ranks.world.rank}). Move the module to {wanted}."
            )

    def rehome(self, master: torch.Tensor) -> None:
        """Let ``master`` (``[shard_numel]``), of whatever dtype and device, be the master from now on.

        Raises:
            StateError: gradients wait to be reduced, or an optimizer holds a flat parameter over the master of before.
        """
        unit = self._unit
        if self.flat is not None:
            raise StateError(
                f"The parameters of '{unit.name}' cannot become {master.dtype} on {master.device} behind "
                f"polyshard.flat_parameters, which are over what was there before (rank {unit.ranks.world.rank}). Move "
                "or cast the model first."
            )
        if unit.packed and master.dtype != unit.master.dtype:
            raise ParameterChangedError(
                f"'{unit.parameters[0].names[0]}' is a {unit.packed[0].cls.__name__} of bytes with a meaning, and was "
                f"cast from {unit.master.dtype} to {master.dtype} (rank {unit.ranks.world.rank}). Cast the model "
                "before it is quantized, or its other parameters alone."
            )
        if unit.gradients.unreduced:
            raise StateError(
                f"The parameters of '{unit.name}' cannot become {master.dtype} on {master.device} while gradients wait "
                f"to be reduced (rank {unit.ranks.world.rank}). Move or cast the model after a backward that reduces "
                "them, or after zero_grad()."
            )
        unit.spec = dataclasses.replace(unit.spec, master_dtype=master.dtype)
        unit.dtypes = dtypes_of(unit.precision, unit.spec, unit.ranks.world.rank, packed=bool(unit.packed))
        unit.use_master(unit.offload.place(unit.spec, master) if unit.offloaded else master)
        self._be_found()

    def _take_values(self, found: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        unit = self._unit
        if dtype != unit.master.dtype or device != unit.master.device:
            if device.type == "cpu" != unit.spec.device.type:
                # What moved them may not have waited.
                torch.accelerator.current_stream(unit.spec.device).synchronize()
            self.rehome(torch.zeros(unit.layout.shard_numel, dtype=dtype, device=device))
            return
        for index, local in enumerate(found):
            part = self._part(index)
            if part.data_ptr() != local.data_ptr():
                part.copy_(local)
        self.expose()

    def _take_replacement(self, index: int, parameter: ManagedParameter) -> bool:
        """Let what modules hold in the place of ``parameter`` be it; returns whether that is another object."""
        held = [module._parameters.get(key) for module, key in parameter.sites]
        others = [each for each in held if each is not parameter.original]
        if not others:
            return False
        rank = self._unit.ranks.world.rank
        other = others[0]
        if other is None:
            raise ParameterChangedError(
                f"The parameter '{parameter.names[0]}' was removed from its module (rank {rank}). Put it back before "
                "the next forward; pruning and parametrizations, which remove it, come before sharding."
            )
        spec = self._specs[index]
        if tuple(other.shape) != tuple(spec.shape):
            raise ParameterChangedError(
                f"Cannot writeback when the parameter shape changes\nExpects {tuple(spec.shape)} but got "
                f"{tuple(other.shape)} for '{parameter.names[0]}' (rank {rank}). Keep the whole shape."
            )
        if not is_dtensor(other):
            raise ParameterChangedError(
                f"'{parameter.names[0]}' was replaced by a plain tensor (rank {rank}), and is a DTensor with "
                f"{tuple(spec.placements)} on {spec.mesh}. Give a DTensor that lies so: distribute_tensor(value, "
                "parameter.device_mesh, parameter.placements)."
            )
        placed: Any = other
        if placed.device_mesh != spec.mesh or tuple(placed.placements) != tuple(spec.placements):
            raise ParameterChangedError(
                f"'{parameter.names[0]}' was replaced by a DTensor with {placed.placements} on {placed.device_mesh} "
                f"(rank {rank}), and lies with {tuple(spec.placements)} on {spec.mesh}. Redistribute it."
            )
        parameter.original = placed
        for module, key in parameter.sites:
            module._parameters[key] = placed
        return True

    @override
    def retrained(self) -> bool:
        trained = list(map(_is_trained, self.tensors))
        changed = trained != self._trained
        if changed:
            for local, each in zip(self.locals, trained, strict=True):
                local.requires_grad_(each)
        self._trained = trained
        return changed

    @override
    def take_trained(self, leaves: Sequence[torch.Tensor]) -> bool:
        found = list(map(_is_trained, leaves))
        if found == self._trained:
            return False
        for placed, trained, before in zip(self.tensors, found, self._trained, strict=True):
            if trained is not before:
                placed.requires_grad_(trained)
        return self.retrained()

    @override
    def refuse_changes(self) -> None:
        """Raise for parameters replaced or written to between forward and backward: autograd has saved the old ones.

        Raises:
            ParameterMovedError: naming the parameter.
            ParameterChangedError: whole ones were written to.
        """
        if self._unit.gathered.held_versions is not None:
            self._unit.gathered.refuse_lost_writes()
        if self.exchanged:
            lies = map(is_, map(_torch_private.local_tensor, self.tensors), self._views)
            moved = next((slot for slot, same in enumerate(lies) if not same), None)
            name = self.replaced if moved is None else self._unit.parameters[moved].names[0]
            raise ParameterMovedError(
                f"Parameters cannot be changed between forward and backward: '{name}' was replaced on rank "
                f"{self._unit.ranks.world.rank}. Replace it before the forward or after the backward."
            )
        # Autograd asks a leaf whether it wants its gradient when that arrives.
        if list(map(_is_trained, self.tensors)) != self._trained and self.retrained():
            self.follow_requires_grad()


def keep_attributes(placed: nn.Parameter, attributes: Mapping[str, Any], without: Collection[str] = ()) -> None:
    """Let ``placed``, which stands for a parameter with ``attributes``, have these, but those ``without``."""
    vars(placed).update(
        {key: value for key, value in attributes.items() if not (key.startswith("_") or key in without)}
    )
