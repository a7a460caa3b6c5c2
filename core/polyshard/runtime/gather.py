"""Gathers: the memory that holds whole units, and the functions that fill it.

A gather works on records: code that moves bytes reads a unit's record and never calls the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

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
from ..planning.layout import FlatLayout


@dataclass(eq=False, slots=True)
class GatherRecord:
    """One unit, as a gather sees it."""

    spec: UnitSpec
    group: Collectives | None
    """The ranks that share the unit; None where nothing is sent."""
    source: torch.Tensor
    """This rank's shard (``[shard_numel]``, master dtype), where ``offload`` has it if it is parked."""
    buffer: FlatBuffer
    """The whole unit is gathered here (``[padded_numel]``, compute dtype)."""
    allocator: Collectives
    """Its backend may have memory of its own for gathers."""
    offload: OffloadManager | None
    """It alone reads a parked ``source``; None where nothing is parked."""
    caster: PrecisionCaster
    wire: WireSpec | None
    """How the unit travels where ``caster`` encodes it; None for as ``buffer`` is."""
    observers: tuple[Observer, ...]
    places: list[object]
    """Where the unit was used since its gather, as ``CommStreams.here`` says. The unit's own list."""

    @property
    def allocation(self) -> AbstractContextManager[Any]:
        """A context in which memory for the buffer is taken."""
        return self.allocator.allocation(BufferRole.GATHER, self.buffer.nbytes)


def start_gathers(records: Sequence[GatherRecord]) -> Sequence[Work]:
    """Write the own slices into attached buffers, and start the gathers: one launch for each group of ranks,
    in the order in which the groups come up.

    ``end_gather`` follows for each record, where operations are ordered behind the returned works.
    """
    if len(records) == 1:
        return (_start_one(records[0]),)
    # As ``alike`` does, without a call.
    together: dict[int, list[GatherRecord]] = {}
    for record in records:
        together.setdefault(id(record.group), []).append(record)
    works: list[Work] = []
    try:
        for members in together.values():
            group = members[0].group
            if group is None:
                works += [_start_one(record) for record in members]
            else:
                works.append(_start_many(group, members))
    except BaseException:
        # Others are on their way into memory that is released next.
        for work in works:
            with suppress(PolyshardError):
                work.wait()
        raise
    return works


def end_gather(record: GatherRecord) -> None:
    """Call the observers: the gather ends at the present point of the current stream."""
    for observer in record.observers:
        observer.unsharded(record.spec)


def _start_one(record: GatherRecord) -> Work:
    for observer in record.observers:
        observer.unshard(record.spec)
    group, buffer = record.group, record.buffer
    if record.wire is not None and group is not None:
        encoded = _EncodedGather(group, [record])
        return encoded.behind(issued(group.all_gather(*encoded.pairs[0]), "all_gather", group, record.spec.label))
    if record.offload is not None:
        record.offload.fetch(record.spec, record.source, buffer.own)
    else:
        # The cast is the copy-in: master dtype to compute dtype, straight into the slice that is sent.
        buffer.own.copy_(record.source)
    if group is None:
        return COMPLETED
    return issued(group.all_gather(buffer.flat, buffer.own), "all_gather", group, record.spec.label)


def _start_many(group: Collectives, records: Sequence[GatherRecord]) -> Work:
    for record in records:
        for observer in record.observers:
            observer.unshard(record.spec)
    plain = [record for record in records if record.wire is None]
    here = [record for record in plain if record.offload is None]
    if here:
        # The cast is the copy-in, as for one, in one launch.
        _torch_private.foreach_copy_([record.buffer.own for record in here], [record.source for record in here])
    if len(here) < len(plain):
        for record in plain:
            if record.offload is not None:
                record.offload.fetch(record.spec, record.source, record.buffer.own)
    pairs = [(record.buffer.flat, record.buffer.own) for record in plain]
    if len(plain) == len(records):
        return issued(group.all_gather_many(pairs), "all_gather_many", group, "")
    encoded = _EncodedGather(group, [record for record in records if record.wire is not None])
    return encoded.behind(issued(group.all_gather_many(pairs + encoded.pairs), "all_gather_many", group, ""))


def _on_device(record: GatherRecord) -> torch.Tensor:
    """The shard on the device that computes."""
    if record.offload is None:
        return record.source
    shard = torch.empty(record.source.numel(), dtype=record.source.dtype, device=record.spec.device)
    record.offload.fetch(record.spec, record.source, shard)
    return shard


class _EncodedGather:
    """Units that travel as bytes of their casters: own shards are encoded here, and ``pairs`` are to be gathered."""

    def __init__(self, group: Collectives, records: Sequence[GatherRecord]) -> None:
        nbytes = [record.wire.nbytes_per_rank for record in records if record.wire is not None]
        sizes = [group.world_size * each for each in nbytes]
        ends = list(accumulate(-(-size // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES for size in sizes))
        # In one piece of memory: allocating many costs the host more than cutting one.
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=records[0].spec.device)
        wires = [
            memory[start : start + size].view(group.world_size, -1)
            for start, size in zip([0, *ends], sizes, strict=False)
        ]
        owns = [wire[group.rank] for wire in wires]
        #: The bytes that each unit's gather fills, and this rank's part of them.
        self.pairs = [(wire.view(-1), own) for wire, own in zip(wires, owns, strict=True)]
        self._decodes: list[Callable[[], None]] = []
        for caster in {id(record.caster): record.caster for record in records}.values():
            mine = [index for index, record in enumerate(records) if record.caster is caster]
            specs = [records[index].spec for index in mine]
            caster.encode_many(specs, [owns[index] for index in mine], [_on_device(records[index]) for index in mine])
            outs = [records[index].buffer.flat.view(group.world_size, -1) for index in mine]
            self._decodes.append(partial(caster.decode_many, specs, [wires[index] for index in mine], outs))

    def behind(self, gather: Work) -> Work:
        """``gather``, of ``pairs`` and maybe others, and then the decoding."""
        return _Decoding(self._decodes, gather)


@dataclass(slots=True)
class _Decoding:
    """Waits for the bytes, then decodes them once."""

    decodes: list[Callable[[], None]]
    gather: Work

    def wait(self) -> None:
        self.gather.wait()
        for decode in self.decodes:
            decode()
        self.decodes = []


class FlatBuffer:
    """A unit's worth of elements in one dtype, and static views of it, one per parameter.

    The views are made once. ``attach`` and ``release`` resize the one storage that they share: whatever autograd saved
    (a weight, its transpose) points at that storage, and is right again once the next gather has filled it.

    A view's version counter is its own: writing through ``flat`` bumps none of them, so a gather between forward and
    backward does not look like an in-place change of a saved tensor.

    Reading a released view is a crash, not an exception: callers hide views before they release the buffer.
    """

    def __init__(self, flat: torch.Tensor, layout: FlatLayout, *, resizable: bool, rank: int = 0) -> None:
        self.flat = flat
        #: This rank's shard of ``flat``.
        self.own = flat.narrow(0, rank * layout.shard_numel, layout.shard_numel)
        self.dtype = flat.dtype
        self.views = [view_of(flat, slot.shape, slot.stride, slot.offset) for slot in layout.slots]
        self.gaps = [flat.narrow(0, offset, numel) for offset, numel in layout.gaps()]
        self.address = flat.data_ptr()
        self._storage = flat.untyped_storage()
        #: Bytes while attached.
        self.nbytes = self._storage.nbytes()
        self._resizable = resizable
        # Resizable, and pinned.
        self._pinned = False
        self.attached = True

    @classmethod
    def allocate(
        cls, layout: FlatLayout, dtype: torch.dtype, device: torch.device, *, rank: int = 0, leaves: bool = False
    ) -> FlatBuffer:
        """A buffer that starts released. ``leaves``: its views collect gradients."""
        # Built inside an inference pass, views would refuse autograd for the rest of their life.
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
            buffer = cls(flat, layout, resizable=True, rank=rank)
            buffer.release()
            if leaves:
                buffer.make_leaves()
        return buffer

    @classmethod
    def lease(cls, layout: FlatLayout, dtype: torch.dtype, collectives: Collectives) -> FlatBuffer:
        """A buffer of leaves at a fixed address that ``collectives`` owns."""
        with torch.inference_mode(False):
            flat = collectives.lease(layout.padded_numel, dtype, BufferRole.GATHER)
            buffer = cls(flat, layout, resizable=False, rank=collectives.rank)
            buffer.attached = False
            buffer.make_leaves()
        return buffer

    @classmethod
    def over(cls, flat: torch.Tensor, layout: FlatLayout) -> FlatBuffer:
        """Leaves over memory that already holds the values and is never released."""
        with torch.inference_mode(False):
            buffer = cls(flat, layout, resizable=False)
            buffer.make_leaves()
        return buffer

    def make_leaves(self) -> None:
        """Let every view collect a gradient of its own."""
        for view in self.views:
            view.requires_grad_(True)

    def attach(self) -> None:
        """Give the buffer memory, uninitialised, from the current stream's pool. Nothing happens if it has some."""
        if self._resizable and not self.attached:
            self._storage.resize_(self.nbytes)
            self.address = self.flat.data_ptr()
        self.attached = True

    def release(self) -> None:
        """Take the memory away. Nothing happens if it has none."""
        if self._resizable and self.attached:
            self._storage.resize_(0)
        self.attached = False

    def pin(self) -> bool:
        """Let the attached buffer hold its memory and values from now on, whether or not it is released.

        Returns whether that is possible: not where the memory is another's.
        """
        self._pinned |= self._resizable
        self._resizable = False
        return self._pinned

    def unpin(self) -> None:
        """Undo ``pin``."""
        if self._pinned:
            self._resizable, self._pinned = True, False
            if not self.attached:
                self._storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this buffer's memory."""
        if tensor.is_meta:
            # Meta tensors have no addresses.
            return self.attached and tensor.untyped_storage() is self._storage
        return self.attached and 0 <= tensor.data_ptr() - self.address < self.nbytes


def view_of(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor over ``flat``'s memory with a version counter of its own, unknown to autograd as a view."""
    return flat.as_strided(shape, stride, flat.storage_offset() + offset).data
