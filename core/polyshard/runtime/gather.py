"""Gathers: the memory that holds whole units, and the functions that fill it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from .. import _torch_private
from ..errors import PolyshardError
from ..interfaces import (
    COMPLETED,
    SLICE_ALIGNMENT_BYTES,
    BufferRole,
    Collectives,
    Observer,
    OffloadManager,
    PrecisionCaster,
    UnitSpec,
    WireSpec,
    Work,
)
from ..planning.answers import issued
from ..planning.groups import UnitRanks
from ..planning.layout import FlatLayout, Slot


class Source(NamedTuple):
    """What a gather is made from, and among whom."""

    group: Collectives | None
    """The ranks that share the unit, or neighbours among them; None where nothing is sent."""
    memory: torch.Tensor
    """This rank's shard (``[shard_numel]``, master dtype), where ``keeper`` has it if it is parked. Where ``group`` is
    of neighbours, its ``PostForwardShard``."""
    keeper: OffloadManager | None
    """It alone reads parked ``memory``; None where nothing is parked."""
    wire: WireSpec | None
    """How the unit travels where its caster encodes it; None for as its buffer is."""
    slices: Sequence[torch.Tensor]
    """The slices of ``memory``, one for each of ``owns``."""
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """What the gather fills, one a segment of the buffer, and this rank's slice of it."""
    owns: list[torch.Tensor]
    """These slices."""


class Gatherable(Protocol):
    """A unit as gathers see it, which read it when they are issued."""

    spec: UnitSpec
    ranks: UnitRanks
    caster: PrecisionCaster
    observers: tuple[Observer, ...]
    places: list[object]
    """Where it was used since its gather, as ``CommStreams.here`` says."""
    buffer: FlatBuffer
    """It is gathered here (``[padded_numel]``, compute dtype)."""
    source: Source


def allocation_of(unit: Gatherable) -> AbstractContextManager[Any]:
    """A context in which memory for the buffer is taken: its backend may have memory of its own for gathers."""
    return (unit.source.group or unit.ranks.world).allocation(BufferRole.GATHER, unit.buffer.nbytes)


def start_gathers(units: Sequence[Gatherable]) -> Sequence[Work]:
    """Write the own slices into attached buffers, and start the gathers: one launch for each group of ranks,
    in the order in which the groups come up.

    ``end_gather`` follows for each unit, where operations are ordered behind the returned works.
    """
    if len(units) == 1:
        return (_start_one(units[0]),)
    # As ``alike`` does, without a call.
    together: dict[int, list[Gatherable]] = {}
    for unit in units:
        together.setdefault(id(unit.source.group), []).append(unit)
    works: list[Work] = []
    try:
        for members in together.values():
            group = members[0].source.group
            if group is None:
                works += [_start_one(unit) for unit in members]
            else:
                works.append(_start_many(group, members))
    except BaseException:
        wait_quietly(works)
        raise
    return works


def wait_quietly(works: Iterable[Work]) -> None:
    """Let operations end that were issued with one that failed: they write into memory that is released next."""
    for work in works:
        with suppress(PolyshardError):
            work.wait()


def end_gather(unit: Gatherable) -> None:
    """Call the observers: the gather ends at the present point of the current stream."""
    for observer in unit.observers:
        observer.unsharded(unit.spec)


def _start_one(unit: Gatherable) -> Work:
    source, buffer = unit.source, unit.buffer
    group = source.group
    if buffer.divided:
        return _start_many(group, (unit,))
    for observer in unit.observers:
        observer.unshard(unit.spec)
    if source.wire is not None and group is not None:
        encoded = _EncodedGather(group, [unit])
        return encoded.behind(issued(group.all_gather(*encoded.pairs[0]), "all_gather", group, unit.spec))
    own = source.owns[0]
    if source.keeper is not None:
        source.keeper.fetch(unit.spec, source.memory, own)
    else:
        # The cast is the copy-in: master dtype to compute dtype, straight into the slice that is sent.
        own.copy_(source.memory)
    if group is None:
        return COMPLETED
    return issued(group.all_gather(buffer.flat, own), "all_gather", group, unit.spec)


def _start_many(group: Collectives | None, units: Sequence[Gatherable]) -> Work:
    for unit in units:
        for observer in unit.observers:
            observer.unshard(unit.spec)
    plain = [unit for unit in units if unit.source.wire is None]
    here = [unit for unit in plain if unit.source.keeper is None]
    behind = [each for unit in plain for each in unit.buffer.behind]
    for unit in plain:
        for stage in unit.buffer.stages:
            stage.attach()
        if unit.buffer.encode is not None:
            unit.buffer.encode(_on_device(unit))
    owns = [own for unit in here for own in unit.source.owns]
    if owns:
        # The cast is the copy-in, as for one, in one launch.
        _torch_private.foreach_copy_(owns, [each for unit in here for each in unit.source.slices])
    if len(here) < len(plain):
        for unit in plain:
            if unit.source.keeper is not None and unit.buffer.encode is None:
                _fetch(unit, unit.source.keeper)
    pairs = [pair for unit in plain for pair in unit.source.pairs]
    spec = units[0].spec if len(units) == 1 else None
    if group is None:
        # What is made of bytes is made so on one rank, too.
        gather = COMPLETED
    elif len(plain) == len(units):
        gather = issued(group.all_gather_many(pairs), "all_gather_many", group, spec)
    else:
        encoded = _EncodedGather(group, [unit for unit in units if unit.source.wire is not None])
        gather = encoded.behind(issued(group.all_gather_many(pairs + encoded.pairs), "all_gather_many", group, spec))
    return Then(behind, gather) if behind else gather


def _fetch(unit: Gatherable, keeper: OffloadManager) -> None:
    memory, owns = unit.source.memory, unit.source.owns
    if not unit.buffer.layout.segments:
        keeper.fetch(unit.spec, memory, owns[0])
        return
    # A manager writes the shard in one piece.
    shard = torch.empty(memory.numel(), dtype=unit.buffer.dtype, device=unit.spec.device)
    keeper.fetch(unit.spec, memory, shard)
    _torch_private.foreach_copy_(owns, slices_of(shard, unit.buffer.layout))


def _on_device(unit: Gatherable) -> torch.Tensor:
    """The shard on the device that computes."""
    source = unit.source
    if source.keeper is None:
        return source.memory
    shard = torch.empty(source.memory.numel(), dtype=source.memory.dtype, device=unit.spec.device)
    source.keeper.fetch(unit.spec, source.memory, shard)
    return shard


class _EncodedGather:
    """Units that travel as bytes of their casters: own shards are encoded here, and ``pairs`` are to be gathered."""

    def __init__(self, group: Collectives, units: Sequence[Gatherable]) -> None:
        nbytes = [unit.source.wire.nbytes_per_rank for unit in units if unit.source.wire is not None]
        sizes = [group.world_size * each for each in nbytes]
        ends = list(accumulate(-(-size // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES for size in sizes))
        # In one piece of memory: allocating many costs the host more than cutting one.
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=units[0].spec.device)
        wires = [
            memory[start : start + size].view(group.world_size, -1)
            for start, size in zip([0, *ends], sizes, strict=False)
        ]
        owns = [wire[group.rank] for wire in wires]
        #: The bytes that each unit's gather fills, and this rank's part of them.
        self.pairs = [(wire.view(-1), own) for wire, own in zip(wires, owns, strict=True)]
        self._decodes: list[Callable[[], None]] = []
        for caster in {id(unit.caster): unit.caster for unit in units}.values():
            mine = [index for index, unit in enumerate(units) if unit.caster is caster]
            specs = [units[index].spec for index in mine]
            caster.encode_many(specs, [owns[index] for index in mine], [_on_device(units[index]) for index in mine])
            buffers = [units[index].buffer for index in mine]
            self._decodes.append(partial(_decode, caster, specs, [wires[index] for index in mine], buffers))

    def behind(self, gather: Work) -> Work:
        """``gather``, of ``pairs`` and maybe others, and then the decoding."""
        return Then(self._decodes, gather)


def _decode(
    caster: PrecisionCaster, specs: list[UnitSpec], wires: list[torch.Tensor], buffers: list[FlatBuffer]
) -> None:
    # A caster writes one rank's elements after the other's, whatever segments they lie in.
    rows = [
        (torch.empty_like(buffer.flat) if buffer.layout.segments else buffer.flat).view(len(wire), -1)
        for buffer, wire in zip(buffers, wires, strict=True)
    ]
    caster.decode_many(specs, wires, rows)
    for buffer, row in zip(buffers, rows, strict=True):
        if buffer.layout.segments:
            _torch_private.foreach_copy_(by_rank(buffer.flat, buffer.layout), columns_of(row, buffer.layout))


@dataclass(slots=True)
class Then:
    """Waits for what was gathered, then does the rest once: decodes bytes, copies staged parameters."""

    rest: list[Callable[[], None]]
    gather: Work

    def wait(self) -> None:
        self.gather.wait()
        for each in self.rest:
            each()
        self.rest = []


class FlatBuffer:
    """A unit's worth of elements in one dtype, and static views of it, one per parameter.

    The views are made once. ``attach`` and ``release`` resize the one storage that they share: whatever autograd saved
    (a weight, its transpose) points at that storage, and is right again once the next gather has filled it.

    The views have one version counter, that of ``flat``. Units set it: [Note: stale reads].

    Computing with a released view is a crash, not an exception: callers hide views before they release the buffer.
    """

    #: The version of views while their buffer is released: greater than any that a saved tensor has.
    RELEASED = 10**9
    #: Writes what a shard (``[shard_numel]``, master dtype) travels as into this rank's part; None for a cast.
    encode: Callable[[torch.Tensor], None] | None = None

    def __init__(
        self,
        flat: torch.Tensor,
        layout: FlatLayout,
        *,
        resizable: bool,
        rank: int = 0,
        reduces: bool = False,
        neighbours: Collectives | None = None,
    ) -> None:
        self.flat = flat
        self.layout = layout
        self.dtype = flat.dtype
        self.device = flat.device
        #: Whether a gather fills several parts of it.
        self.divided = bool(layout.segments)
        self.views = [
            flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset).detach()
            for slot in layout.slots
        ]
        #: The segments of ``flat``.
        self.parts = parts_of(flat, layout)
        #: Where staged parameters arrive, before they are copied to their views.
        self.stages: list[Stage] = []
        #: The indices of parameters that lie rank by rank, as reductions read them, and whose views say so.
        self.ranked: tuple[int, ...] = layout.staged if reduces else ()
        outs = list(self.parts)
        for index in layout.staged:
            slot = layout.slots[index]
            if reduces:
                self.views[index] = outs[slot.segment].view(layout.world_size, *_local(slot, layout))
            else:
                self.stages.append(Stage(flat, layout, slot))
                outs[slot.segment] = self.stages[-1].flat
        #: This rank's slices, one in each segment.
        sizes = layout.slices
        self.owns = [out.narrow(0, rank * size, size) for out, size in zip(outs, sizes, strict=True)]
        #: What gathers fill, one a segment, and this rank's slice of it.
        self.pairs = list(zip(outs, self.owns, strict=True))
        #: What this rank keeps of it for a gather among ``neighbours``; None where that is nothing.
        self.post_forward = None if neighbours is None else PostForwardShard(flat, layout, outs, neighbours)
        #: What is done behind a gather, where compute waits for it.
        self.behind: list[Callable[[], None]] = [stage.empty for stage in self.stages]
        # Memory without bytes has no slices.
        for stage in self.stages:
            stage.release()
        self.gaps = [flat.narrow(0, offset, numel) for offset, numel in layout.gaps()]
        self.address = flat.data_ptr()
        storage = flat.untyped_storage()
        #: Bytes while attached.
        self.nbytes = storage.nbytes()
        # What comes and goes, with its bytes.
        self._storages = [(storage, self.nbytes)]
        self._resizable = resizable
        #: Tensors whose version counters follow gathers and releases: that of the views, and of leaves around them.
        self.versioned: Sequence[torch.Tensor] = ()
        self._released_versions: list[int] = []
        #: Whether it holds memory and values also where it is released.
        self.pinned = False
        #: As ``keep`` was told.
        self.keeps = False
        self.attached = True

    @classmethod
    def allocate(
        cls,
        layout: FlatLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rank: int = 0,
        gathers: bool = False,
        neighbours: Collectives | None = None,
    ) -> FlatBuffer:
        """A buffer that starts released. ``gathers``: gathers fill it, and not reductions.

        ``neighbours``: ranks among which a part of it, kept behind a forward, is gathered for backward.
        """
        # Built inside an inference pass, views would refuse autograd for the rest of their life.
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
            buffer = cls(flat, layout, resizable=True, rank=rank, reduces=not gathers, neighbours=neighbours)
            buffer.release()
        return buffer

    @classmethod
    def lease(cls, layout: FlatLayout, dtype: torch.dtype, collectives: Collectives) -> FlatBuffer:
        """A buffer for gathers, at a fixed address that ``collectives`` owns."""
        with torch.inference_mode(False):
            flat = collectives.lease(layout.padded_numel, dtype, BufferRole.GATHER)
            buffer = cls(flat, layout, resizable=False, rank=collectives.rank)
            buffer.attached = False
        return buffer

    @classmethod
    def over(cls, flat: torch.Tensor, layout: FlatLayout) -> FlatBuffer:
        """A buffer over memory that already holds the values and is never released."""
        with torch.inference_mode(False):
            buffer = cls(flat, layout, resizable=False)
            # An in-place change of one is no change of the others, and stays.
            buffer.views = [view.data for view in buffer.views]
        return buffer

    def rank_by_rank(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """``gradients``, one a parameter, each as its view has it."""
        found = list(gradients)
        for index in self.ranked:
            gradient = found[index]
            if gradient is not None:
                found[index] = _ranks_first(gradient, self.layout.slots[index], self.layout)
        return found

    def attach(self) -> None:
        """Give the buffer memory, uninitialised, from the current stream's pool. Nothing happens if it has some."""
        if self._resizable and not self.attached:
            for storage, nbytes in self._storages:
                if not (self.keeps and storage.nbytes()):
                    storage.resize_(nbytes)
            self.address = self.flat.data_ptr()
        self.attached = True

    def release(self) -> None:
        """Take the memory away. Nothing happens if it has none."""
        if self._resizable and self.attached and not self.keeps:
            for storage, _ in self._storages:
                storage.resize_(0)
        if self.versioned and not self.pinned:
            _torch_private.set_versions(self.versioned, self._released_versions)
        self.attached = False

    def follow_versions(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the version counters of ``tensors`` follow gathers and releases."""
        self.versioned, self._released_versions = tensors, [self.RELEASED] * len(tensors)

    def pin(self) -> bool:
        """Let the attached buffer hold its memory and values from now on, whether or not it is released.

        Returns whether that is possible: not where the memory is another's.
        """
        self.pinned |= self._resizable
        self._resizable = False
        return self.pinned

    def unpin(self) -> None:
        if self.pinned:
            self._resizable, self.pinned = True, False
            if not self.attached:
                self.attached = True
                self.release()

    def keep(self, keeps: bool) -> None:
        """Whether it holds memory, and no values, where it is released, from now on."""
        self.keeps = keeps
        if not (keeps or self.attached):
            self.attached = True
            self.release()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this buffer's memory."""
        if tensor.is_meta:
            # Meta tensors have no addresses.
            return self.attached and tensor.untyped_storage() is self.flat.untyped_storage()
        return self.attached and 0 <= tensor.data_ptr() - self.address < self.nbytes


class Stage:
    """Memory in which a staged parameter arrives rank by rank: there while it travels."""

    def __init__(self, flat: torch.Tensor, layout: FlatLayout, slot: Slot) -> None:
        self.flat = torch.empty(slot.numel, dtype=flat.dtype, device=flat.device)
        self._place = _ranks_first(view_of(flat, slot.shape, slot.stride, slot.offset), slot, layout)
        self._part = self.flat.view(self._place.shape)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()

    def release(self) -> None:
        """Give the memory back; what arrived is lost."""
        self._storage.resize_(0)

    def attach(self) -> None:
        """Take memory from the current stream's pool."""
        self._storage.resize_(self._nbytes)

    def empty(self) -> None:
        """Copy what arrived to the parameter, and give the memory back, on the stream that took it."""
        self._place.copy_(self._part)
        self._storage.resize_(0)


class PostForwardShard:
    """The part of a gather buffer that this rank keeps between forward and backward, in memory of its own.

    Of each segment, rank ``j`` of ``n`` neighbours keeps the ``j``-th of ``n`` equal parts. These are slices of several
    ranks, one behind the other, so that a gather among the neighbours fills the segment as one among all ranks does.
    """

    def __init__(
        self, flat: torch.Tensor, layout: FlatLayout, outs: Sequence[torch.Tensor], neighbours: Collectives
    ) -> None:
        """``outs``: what gathers fill, one a segment of ``flat``."""
        number, rank = neighbours.world_size, neighbours.rank
        kept = layout.world_size // number
        sizes = [out.numel() // number for out in outs]
        self.owns = [out.narrow(0, rank * size, size) for out, size in zip(outs, sizes, strict=True)]
        #: What a gather among the neighbours fills, one a segment, and this rank's part of it.
        self.pairs = list(zip(outs, self.owns, strict=True))
        self.memory = torch.empty(kept * layout.shard_numel, dtype=flat.dtype, device=flat.device)
        #: What is kept of each segment.
        self.slices = parts_of(self.memory, replace(layout, world_size=kept))
        self._parts, self._places = list(self.owns), list(self.slices)
        for index in layout.staged:
            slot = layout.slots[index]
            whole = _ranks_first(view_of(flat, slot.shape, slot.stride, slot.offset), slot, layout)
            part = self._parts[slot.segment] = whole.narrow(0, rank * kept, kept)
            self._places[slot.segment] = self.slices[slot.segment].view(part.shape)
        self._storage = self.memory.untyped_storage()
        #: Bytes while they are kept.
        self.nbytes = self._storage.nbytes()
        self.release()

    def fill(self) -> None:
        """Take memory from the current stream's pool, and copy the part of the buffer there."""
        self._storage.resize_(self.nbytes)
        _torch_private.foreach_copy_(self._places, self._parts)

    def release(self) -> None:
        """Give the memory back."""
        self._storage.resize_(0)


def parts_of(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """The segments of ``flat`` (``[padded_numel]``), each ``[world_size * slice]``."""
    ranks = layout.world_size
    return [flat.narrow(0, ranks * each.start, ranks * each.numel) for each in layout.segments] or [flat]


def slices_of(shard: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """What ``shard`` (``[shard_numel]``) has of each segment."""
    return [shard.narrow(0, each.start, each.numel) for each in layout.segments] or [shard]


def by_rank(flat: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """The segments of ``flat``, a whole unit, as ``[world_size, slice]``, or ``[world_size, *piece]`` where staged."""
    found = [part.view(layout.world_size, part.numel() // layout.world_size) for part in parts_of(flat, layout)]
    for index in layout.staged:
        slot = layout.slots[index]
        found[slot.segment] = _ranks_first(view_of(flat, slot.shape, slot.stride, slot.offset), slot, layout)
    return found


def columns_of(rows: torch.Tensor, layout: FlatLayout) -> list[torch.Tensor]:
    """As ``by_rank``, of shards one below the other (``[n, shard_numel]``)."""
    found = [rows.narrow(1, each.start, each.numel) for each in layout.segments] or [rows]
    for index in layout.staged:
        slot = layout.slots[index]
        found[slot.segment] = found[slot.segment].view(len(rows), *_local(slot, layout))
    return found


def shard_in(flat: torch.Tensor, layout: FlatLayout, rank: int) -> torch.Tensor:
    """The shard of ``rank`` in ``flat``, a whole unit: a view where there is one segment, else a copy."""
    if not layout.segments:
        return flat.narrow(0, rank * layout.shard_numel, layout.shard_numel)
    shard = torch.zeros(layout.shard_numel, dtype=flat.dtype, device=flat.device)
    for place, part in zip(columns_of(shard.unsqueeze(0), layout), by_rank(flat, layout), strict=True):
        place[0].copy_(part[rank])
    return shard


def piece_in(whole: torch.Tensor, slot: Slot, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of a whole parameter, as its piece is shown; a view where its memory allows."""
    if slot.dim:
        each = slot.numel // slot.shape[slot.dim] if slot.numel else 1
        return whole.narrow(slot.dim, start // each, (stop - start) // each).contiguous()
    if whole.stride() != slot.stride:
        whole = torch.empty_strided(slot.shape, slot.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
    return whole.as_strided(*slot.shown(stop - start), whole.storage_offset() + start)


def _local(slot: Slot, layout: FlatLayout) -> tuple[int, ...]:
    """The shape of one rank's piece of a staged parameter."""
    return slot.shown(slot.numel // layout.world_size)[0]


def _ranks_first(whole: torch.Tensor, slot: Slot, layout: FlatLayout) -> torch.Tensor:
    """A staged parameter as ``[world_size, *piece]``, a view."""
    ranks, shape = layout.world_size, slot.shape
    divided = (*shape[: slot.dim], ranks, shape[slot.dim] // ranks, *shape[slot.dim + 1 :])
    return whole.view(divided).movedim(slot.dim, 0)


def view_of(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor over ``flat``'s memory with a version counter of its own, unknown to autograd as a view."""
    return flat.as_strided(shape, stride, flat.storage_offset() + offset).data
