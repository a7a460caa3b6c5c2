"""Values for meta parameters and buffers: whole, one module state at a time, and then only this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..errors import ParameterError, PluginContractError, plugin_name
from ..interfaces import Collectives, OffloadManager, PrecisionPlugin
from ..planning.answers import tensor_fault
from ..planning.extensions import inner_tensors, insides_of, own_rows
from ..planning.groups import PlannedRanks, UnitRanks
from ..planning.layout import FlatLayout, dense_stride, product, round_up
from ..planning.parts import is_dtensor, local_of
from ..planning.plan import ManagedParameter, ModuleParameters
from ..planning.units import PlannedModule, PlannedUnit
from ..planning.values import send_from_first, send_over_copies
from ..runtime.buffers import shard_in, view_of
from .request import Initializer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta


def refuse_uninitializable(owners: Iterable[ModuleParameters], names: Mapping[nn.Module, str], rank: int) -> None:
    """Raise if a module of ``owners`` that holds meta parameters or buffers cannot initialise itself.

    ``names``: of all modules. Raises ParameterError: naming the tensors and their modules.
    """
    held: list[tuple[str, nn.Module]] = []
    for owner in owners:
        for parameter in (each for group in owner.groups for each in group if each.original.is_meta):
            held += [(parameter.names[0], module) for module, _ in parameter.sites]
        for module in owner.modules:
            hollow = [key for key, buffer in module._buffers.items() if is_meta(buffer)]
            held += [(".".join(filter(None, (names[module], key))), module) for key in hollow]
    lacking = [each for each in held if not callable(getattr(each[1], "reset_parameters", None))]
    if lacking:
        missing = sorted({f"{name} ({type(module).__name__})" for name, module in lacking})
        raise ParameterError(
            "Parameters or buffers are on the meta device and their modules have no reset_parameters(): "
            f"{', '.join(missing)} (rank {rank}). Give the modules a reset_parameters() method, or pass initializer=."
        )


def _hollow(owner: PlannedModule) -> dict[nn.Module, None]:
    """The modules that hold meta parameters or buffers of ``owner``."""
    found = {module: None for module in owner.modules if any(map(is_meta, module._buffers.values()))}
    for _, parameter in owner.placed_parameters:
        if parameter.original.is_meta:
            found.update((module, None) for module, _ in parameter.sites)
    return found


def remember(owners: Sequence[PlannedModule], device: torch.device) -> Callable[[], None]:
    """What puts back all that ``Materializer`` changes: buffers, and the generators of random numbers.

    Ranks that drew differently would initialise pieces of different models the next time.
    """
    held = {module: dict(module._buffers) for owner in owners for module in _hollow(owner)}
    if not held:
        return lambda: None
    # An initialiser writes to the buffers that have values already, too.
    values = [
        (buffer, buffer.clone())
        for buffers in held.values()
        for buffer in buffers.values()
        if buffer is not None and not buffer.is_meta
    ]
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        for module, buffers in held.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    return put_back


def look_inside(parameter: ManagedParameter, whole: torch.Tensor, ranks: UnitRanks) -> None:
    """Find out what a parameter that gathers itself, and is ``whole``, is made of.

    Raises:
        ParameterError: it cannot be cut between the ranks, or be trained.
    """
    where, trained = f"'{parameter.names[0]}' on rank {ranks.world.rank}", parameter.original.requires_grad
    found = insides_of(whole, where, ranks.shard_rank, ranks.shard_size, trained=trained)
    fault = found.fault if parameter.leaf is None else "is a DTensor over ranks with other parts of it, or their copies"
    parameter.insides = replace(found, fault=fault)


@dataclass(frozen=True, slots=True)
class Materializer:
    """Gives meta parameters and buffers their values.

    Parameters that are parts of larger tensors are initialised whole too, and then cut: from the same random numbers
    come the same values, whatever the mesh.
    """

    device: torch.device
    initializer: Initializer | None
    ranks_of: Callable[[PlannedRanks], UnitRanks]
    from_first: bool
    """Whether all ranks take rank 0's values of parameters and buffers, module by module. Those that are not on the
    meta device are overwritten in place. Parts of larger tensors, and all that belongs to the ranks of a unit alone,
    come from the first of the ranks that have the same."""

    def masters_of(self, owners: Sequence[PlannedModule]) -> dict[str, list[torch.Tensor]]:
        """The masters of every module that owns meta parameters, by its name; meta buffers are filled in place.

        Memory on ``device`` peaks at the masters and one whole module, whole parameters beside this rank's parts of
        them: all modules are initialised in the same memory, so that no holes are left between the masters.
        """
        masters: dict[str, list[torch.Tensor]] = {}
        with torch.inference_mode(False), torch.no_grad():
            nbytes = max((_scratch_nbytes(owner) for owner in owners if owner.has_meta_parameters), default=0)
            scratch = _Scratch(nbytes, self.device)
            for owner in owners:
                if owner.has_meta_parameters:
                    masters[owner.name] = self._masters(owner, scratch)
                else:
                    for module in _hollow(owner):
                        self._initialize(module, set())
                    if self.from_first:
                        self._send_parameters(owner, [each.original for _, each in owner.placed_parameters])
                if self.from_first:
                    self._send_buffers(owner)
        return masters

    def _masters(self, owner: PlannedModule, scratch: _Scratch) -> list[torch.Tensor]:
        scratch.used = 0
        flats = _flats(owner, scratch, self.device)
        self._fill(owner, flats, scratch)
        if self.from_first:
            self._send_parameters(owner, _values(owner, flats))
        for unit, parameter in owner.placed_parameters:
            if parameter.rows is not None:
                # Of what ``_fill`` made, this rank's rows are left.
                ranks = self.ranks_of(unit.ranks)
                look_inside(parameter, parameter.rows, ranks)
                parameter.rows = own_rows(parameter.rows, ranks.shard_rank, ranks.shard_size)
        return [
            _own_shard(flat, unit.layout, self.ranks_of(unit.ranks).shard_rank) if unit.is_cut else flat
            for unit, flat in zip(owner.units, flats, strict=True)
        ]

    def _send_parameters(self, owner: PlannedModule, values: Sequence[torch.Tensor]) -> None:
        placed = zip(owner.placed_parameters, values, strict=True)
        # By name: a layout may order uneven parts differently on ranks that have others.
        for (unit, parameter), value in sorted(placed, key=lambda pair: pair[0][1].names):
            part = parameter.part
            beside = () if parameter.packed is None else parameter.packed.tensors
            for among in self._groups(unit.ranks, part is not None):
                send_from_first([*inner_tensors(value), *beside], among, self.device)
            if part is not None:
                send_over_copies(value, part.mesh, part.placements, self.device)

    def _send_buffers(self, owner: PlannedModule) -> None:
        for buffer in (each for module in owner.modules for each in module._buffers.values() if each is not None):
            placed = cast("DTensor", buffer) if is_dtensor(buffer) else None
            value = buffer if placed is None else local_of(placed)
            for among in self._groups(owner.ranks, placed is not None):
                send_from_first([value], among, self.device)
            if placed is not None:
                send_over_copies(value, placed.device_mesh, placed.placements, self.device)

    def _groups(self, planned: PlannedRanks, is_part: bool) -> Iterable[Collectives]:
        """Groups through which a value reaches all ranks that have the same, one after the other."""
        ranks = self.ranks_of(planned)
        everyone = not is_part and planned.scope is None
        return (ranks.world,) if everyone else filter(None, (ranks.owner, ranks.replicate))

    def _fill(self, owner: PlannedModule, flats: Sequence[torch.Tensor], scratch: _Scratch) -> None:
        fresh = _hollow(owner)
        parameters = [parameter for _, parameter in owner.placed_parameters]
        held: list[tuple[nn.Module, str, nn.Parameter]] = []
        wholes: list[tuple[ManagedParameter, torch.Tensor, nn.Parameter]] = []
        try:
            for parameter, value in zip(parameters, _values(owner, flats), strict=True):
                original, part = parameter.original, parameter.part
                if parameter.extended:
                    value = parameter.rows = torch.empty_like(original.detach(), device=self.device)
                if not original.is_meta:
                    value.copy_(original)
                if part is None:
                    whole = value
                elif fresh.keys() & {module for module, _ in parameter.sites}:
                    stride = dense_stride(part.shape, part.stride)
                    whole = view_of(scratch.take(product(part.shape), original.dtype), part.shape, stride, 0)
                    if not original.is_meta:
                        module, key = parameter.sites[0]
                        whole.copy_(cast("DTensor", module._parameters[key]).full_tensor())
                else:
                    # Nothing that is initialised sees it.
                    continue
                seen = nn.Parameter(whole, requires_grad=original.requires_grad)
                wholes.append((parameter, value, seen))
                for module, key in parameter.sites:
                    # Of a part the tensor that the original takes the place of later.
                    held.append((module, key, cast("nn.Parameter", module._parameters[key])))
                    module._parameters[key] = seen
            mine = {(module, key) for module, key, _ in held}
            for module in fresh:
                self._initialize(module, mine)
            for parameter, value, seen in wholes:
                module, key = parameter.sites[0]
                # An initialiser may assign a new parameter instead of filling the one that is there.
                current = module._parameters[key]
                if current is not seen and current is not None and not current.is_meta:
                    seen.copy_(current)
                if parameter.part is not None:
                    value.copy_(parameter.part.cut(seen))
        finally:
            for module, key, before in held:
                module._parameters[key] = before

    def _initialize(self, module: nn.Module, mine: set[tuple[nn.Module, str]]) -> None:
        place_buffers(module, self.device, None)
        # A parameter that another module owns is sharded already, or not there yet: initialising must not touch its
        # values.
        others = {
            key: parameter
            for key, parameter in module._parameters.items()
            if parameter is not None and (module, key) not in mine
        }
        for key, parameter in others.items():
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            module._parameters[key] = nn.Parameter(stand_in, requires_grad=False)
        try:
            if self.initializer is not None:
                self.initializer(module)
            else:
                cast("Callable[[], None]", module.reset_parameters)()
        finally:
            module._parameters.update(others)


def _own_shard(flat: torch.Tensor, layout: FlatLayout, rank: int) -> torch.Tensor:
    shard = shard_in(flat, layout, rank)
    return shard if layout.segments else shard.clone()


def _values(owner: PlannedModule, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The whole parameters: views of ``flats``, or what ``_fill`` made."""
    return [
        view_of(flat, slot.shape, slot.stride, slot.offset) if parameter.rows is None else parameter.rows
        for unit, flat in zip(owner.units, flats, strict=True)
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True)
    ]


class _Scratch:
    """Memory that each module is initialised in."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        #: Bytes of it; those behind them are free.
        self.used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``numel`` elements of what is free."""
        found = self._memory[self.used : self.used + numel * dtype.itemsize].view(dtype)
        self.used += self.nbytes(numel, dtype)
        return found

    @staticmethod
    def nbytes(numel: int, dtype: torch.dtype) -> int:
        return round_up(numel * dtype.itemsize, 256)


def _scratch_nbytes(owner: PlannedModule) -> int:
    """What one module needs: wholes that parts are cut from, units that are, too."""
    units = [unit for unit in owner.units if unit.is_cut and not unit.parameters[0].extended]
    taken = [(unit.layout.padded_numel, unit.spec.master_dtype) for unit in units]
    parts = ((each.part, each.original.dtype) for _, each in owner.placed_parameters)
    taken += [(product(part.shape), dtype) for part, dtype in parts if part is not None]
    return sum(_Scratch.nbytes(*each) for each in taken)


def _flats(owner: PlannedModule, scratch: _Scratch, device: torch.device) -> list[torch.Tensor]:
    flats = []
    for unit in owner.units:
        numel, dtype = unit.layout.padded_numel, unit.spec.master_dtype
        if unit.parameters[0].extended:
            # They lie in none: ``_fill`` makes them.
            flats.append(torch.empty(numel, dtype=dtype, device="meta"))
            continue
        flat = scratch.take(numel, dtype) if unit.is_cut else torch.empty(numel, dtype=dtype, device=device)
        for start, gap in unit.layout.gaps():
            flat.narrow(0, start, gap).zero_()
        flats.append(flat)
    return flats


# Offload managers and precision plugins are tried on values before the model changes: wrong values are refused by name.

#: Elements of a shard that are compared: reading all of a large one back would double what offloading takes.
_COMPARED = 1024
#: The least cosine between values and what encoding and decoding leaves of them. Signs alone have 0.87.
_ALIKE = 0.5
#: By how much they may grow or shrink.
_SCALE = 4.0


def place_master(offload: OffloadManager, unit: PlannedUnit, shard: torch.Tensor, rank: int) -> torch.Tensor:
    """Where ``offload`` places ``shard`` (``[shard_numel]``, master dtype), with its values, which it can bring back.

    Raises PluginContractError: ``place`` returned what no parameter can view, or other values; or ``fetch`` does not
    write them.
    """
    spec = unit.spec
    wanted = _sample(shard)
    with torch.inference_mode(False):
        master = offload.place(spec, shard)
    fault = tensor_fault(master, shard.shape, shard.dtype)
    if fault:
        raise PluginContractError(
            f"place of {plugin_name(offload)} returned {fault} for unit '{spec.label}' (rank {rank}). The optimizer "
            f"updates that tensor in place: return a contiguous {tuple(shard.shape)} of {shard.dtype}."
        )
    if shard.is_meta:
        return master
    difference = _difference(_sample(master), wanted)
    if difference is not None:
        raise PluginContractError(
            f"place of {plugin_name(offload)} returned other values than it was given for unit '{spec.label}' (rank "
            f"{rank}): {difference}. Return a copy of the shard, or the shard itself."
        )
    # A gather in compute dtype is written by it; one that is encoded reads the master as it is.
    dtype = unit.dtypes.compute if unit.encoding is None else master.dtype
    # NaN, or -1 where there is none.
    own = torch.full((spec.shard_numel * dtype.itemsize,), 255, dtype=torch.uint8, device=spec.device).view(dtype)
    offload.fetch(spec, master, own)
    difference = _difference(_sample(own), wanted.to(dtype))
    if difference is not None:
        raise PluginContractError(
            f"fetch of {plugin_name(offload)} did not write the master of unit '{spec.label}' (rank {rank}): "
            f"{difference}. Copy all of it into own_slice, on the current stream."
        )
    return master


def try_codecs(owners: Iterable[PlannedModule], collectives: Collectives) -> None:
    """Encode and decode a ramp, once for each precision plugin that encodes, as its smallest unit.

    Raises PluginContractError: what was decoded has little to do with what was encoded.
    """
    smallest: dict[int, tuple[PrecisionPlugin, PlannedUnit]] = {}
    for owner in owners:
        for unit in owner.units:
            unreal = unit.spec.device.type == "meta" or unit.spec.master_dtype.is_complex
            if unit.encoding is None or not unit.spec.shard_numel or unreal:
                continue
            known = smallest.get(id(owner.precision))
            if known is None or unit.spec.shard_numel < known[1].spec.shard_numel:
                smallest[id(owner.precision)] = owner.precision, unit
    for precision, unit in smallest.values():
        _try_codec(precision, unit, collectives)


def _try_codec(precision: PrecisionPlugin, unit: PlannedUnit, collectives: Collectives) -> None:
    spec, shards = unit.spec, unit.layout.world_size
    assert unit.encoding is not None
    ramp = torch.linspace(-1.0, 1.0, spec.shard_numel + 2, dtype=torch.float64)[1:-1]
    shard = ramp.to(device=spec.device, dtype=spec.master_dtype)
    message = torch.zeros(shards, unit.encoding.nbytes_per_rank, dtype=torch.uint8, device=spec.device)
    out = torch.full((shards, spec.shard_numel), float("nan"), dtype=unit.dtypes.compute, device=spec.device)
    with torch.no_grad():
        precision.prepare([spec], collectives)
        # As in a step: together with those that travel along, here by itself.
        precision.encode_many([spec], [message[0]], [shard])
        message.copy_(message[:1].clone().expand_as(message))
        precision.decode_many([spec], [message], [out])
    for row, values in enumerate(out.double().cpu().unbind()):
        if not _alike(values, ramp):
            raise PluginContractError(
                f"decode of {plugin_name(precision)} made {_few(values)} of what encode had made of {_few(ramp)}, as "
                f"the shard of rank {row} in unit '{spec.label}' (rank {collectives.rank}). Let decode undo encode, "
                "for every rank's row."
            )


def _alike(values: torch.Tensor, ramp: torch.Tensor) -> bool:
    if not values.isfinite().all():
        return False
    size, wanted = float(values.norm()), float(ramp.norm())
    if not wanted:
        # One element, the middle of the ramp.
        return size <= 1.0
    return wanted / _SCALE <= size <= wanted * _SCALE and float(values @ ramp) >= _ALIKE * size * wanted


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at even distances, the last one too, on the host."""
    if tensor.is_meta or not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    every = max(1, tensor.numel() // _COMPARED)
    return torch.cat([tensor.detach()[::every], tensor.detach()[-1:]]).cpu()


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """The first in words; None where there is none."""
    different = ~((found == wanted) | (found.isnan() & wanted.isnan()))
    if not different.any():
        return None
    first = int(different.nonzero()[0])
    return f"{found[first].item()} where {wanted[first].item()} was"


def _few(values: torch.Tensor) -> Sequence[float]:
    return [round(value, 4) for value in values[:4].tolist()]


def place_buffers(
    module: nn.Module, device: torch.device, dtype: torch.dtype | None, *, keep_meta: bool = False
) -> None:
    """Move the buffers that ``module`` holds directly to ``device``, floating-point ones also to ``dtype``.

    ``keep_meta``: those on the meta device stay there.
    """
    for key, buffer in module._buffers.items():
        if buffer is None or (keep_meta and buffer.is_meta):
            continue
        wanted = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
        if buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device, dtype=wanted)
        elif buffer.device != device or buffer.dtype != wanted:
            module._buffers[key] = buffer.to(device=device, dtype=wanted)
