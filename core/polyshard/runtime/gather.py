"""Flat memory with one view per parameter, attached only while it is in use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch

from .. import _torch_private
from ..interfaces import SLICE_ALIGNMENT_BYTES, BufferRole, Collectives, PrecisionCaster, UnitSpec, Work
from ..planning.answers import issued
from ..planning.layout import FlatLayout


class FlatBuffer:
    """A unit's worth of elements in one dtype, and static views of it, one per parameter.

    The views are made once. Their memory comes with ``attach`` and goes with ``release``, by resizing the one storage
    that they share: whatever autograd saved (a weight, its transpose) points at that storage and is right again once
    it has been filled again.

    A view's version counter is its own: writing through ``flat`` bumps none of them, so a gather between forward and
    backward does not look like an in-place change of a saved tensor.

    Reading a view while it is released is a crash, not an exception: callers keep views out of reach by then.
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
        # Resizable but for that.
        self._kept = False
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

    def keep(self) -> bool:
        """Leave the memory where it is from now on, with its values, whether or not it is released; to be called while
        it is attached. Returns whether that is possible: not where the memory is another's.
        """
        self._kept |= self._resizable
        self._resizable = False
        return self._kept

    def let_go(self) -> None:
        """End what ``keep`` began."""
        if self._kept:
            self._resizable, self._kept = True, False
            if not self.attached:
                self._storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this buffer's memory."""
        if tensor.is_meta:
            # No addresses there.
            return self.attached and tensor.untyped_storage() is self._storage
        return self.attached and 0 <= tensor.data_ptr() - self.address < self.nbytes


def view_of(flat: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor over ``flat``'s memory with a version counter of its own, unknown to autograd as a view."""
    return flat.as_strided(shape, stride, flat.storage_offset() + offset).data


# Gathers whose bytes are not the parameters in compute dtype.


@dataclass(frozen=True, slots=True)
class EncodedGather:
    """How one unit travels: the bytes of each rank, and the caster that writes them."""

    nbytes_per_rank: int
    caster: PrecisionCaster

    def start(self, spec: UnitSpec, shard: Collectives, source: torch.Tensor, out: torch.Tensor) -> Work:
        """Issue the gather of ``source`` (``[shard_numel]``); its ``wait`` decodes into ``out`` (``[numel]``)."""
        encoded = EncodedUnits(shard, [EncodedUnit(self, spec, source, out)])
        work = shard.all_gather(*encoded.pairs[0])
        return encoded.behind(issued(work, "all_gather", shard, spec.label))


class EncodedUnit(NamedTuple):
    """A unit that is about to travel."""

    gather: EncodedGather
    spec: UnitSpec
    """What its caster is told of it."""
    source: torch.Tensor
    """Its own shard, ``[shard_numel]`` in the master's dtype, on the device."""
    out: torch.Tensor
    """Its gather buffer, ``[numel]``."""


class EncodedUnits:
    """Units that travel together: their own shards are encoded when this is made, and ``pairs`` are to be gathered."""

    def __init__(self, shard: Collectives, units: Sequence[EncodedUnit]) -> None:
        sizes = [shard.world_size * unit.gather.nbytes_per_rank for unit in units]
        ends = list(accumulate(-(-size // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES for size in sizes))
        # In one piece of memory: allocating many costs the host more than cutting one.
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=units[0].out.device)
        wires = [
            memory[start : start + size].view(shard.world_size, -1)
            for start, size in zip([0, *ends], sizes, strict=False)
        ]
        owns = [wire[shard.rank] for wire in wires]
        #: What each unit's gather fills, and its own part of that.
        self.pairs = [(wire.view(-1), own) for wire, own in zip(wires, owns, strict=True)]
        self._decodes: list[_Decode] = []
        for caster in {id(unit.gather.caster): unit.gather.caster for unit in units}.values():
            mine = [index for index, unit in enumerate(units) if unit.gather.caster is caster]
            specs = [units[index].spec for index in mine]
            caster.encode_many(specs, [owns[index] for index in mine], [units[index].source for index in mine])
            outs = [units[index].out.view(shard.world_size, -1) for index in mine]
            self._decodes.append(_Decode(caster, specs, [wires[index] for index in mine], outs))

    def behind(self, gather: Work) -> Work:
        """``gather``, of ``pairs`` and maybe others, and then the decoding."""
        return _Decoding(self._decodes, gather)


class _Decode(NamedTuple):
    caster: PrecisionCaster
    specs: Sequence[UnitSpec]
    wires: Sequence[torch.Tensor]
    outs: Sequence[torch.Tensor]


@dataclass(slots=True)
class _Decoding:
    """Waits for the bytes, then decodes them once."""

    decodes: list[_Decode]
    gather: Work

    def wait(self) -> None:
        self.gather.wait()
        for decode in self.decodes:
            decode.caster.decode_many(decode.specs, decode.wires, decode.outs)
        self.decodes = []


# What communication streams gather: the slices of units, written and sent together.


class Gatherable(Protocol):
    """What communication streams need of a unit."""

    spec: UnitSpec
    buffer: FlatBuffer
    master: torch.Tensor
    #: Where it was used since its gather, as ``CommStreams.here`` says.
    places: list[object]
    #: Whether ``master`` lies where ``fetch`` alone reads it.
    parks: bool
    #: How it travels; None for as ``buffer`` is.
    encoded: EncodedGather | None

    @property
    def gather_group(self) -> Collectives | None:
        """The ranks that ``buffer`` is gathered over; None where it is local."""

    @property
    def source(self) -> torch.Tensor:
        """The master on the device: a parked one is fetched."""

    def fetch(self) -> None:
        """Write the own slice from a parked master."""

    @property
    def allocation(self) -> AbstractContextManager[Any]:
        """The backend's memory for gathers."""

    def fill(self) -> Work:
        """Write the own slice and start the gather."""

    def filling(self) -> None:
        """The gather starts at the present point of the current stream, by other means than ``fill``."""

    def filled(self) -> None:
        """The gather ends at the present point of the current stream."""


_group_of = attrgetter("gather_group")


def fill(units: Sequence[Gatherable]) -> Sequence[Work]:
    """Write the own slices of attached units, and start their gathers."""
    if len(units) == 1:
        return (units[0].fill(),)
    works: list[Work] = []
    together: Iterable[tuple[Collectives | None, Iterable[Gatherable]]] = groupby(units, _group_of)
    for group, members in together:
        if group is None:
            works += [unit.fill() for unit in members]
            continue
        gathered = list(members)
        for unit in gathered:
            unit.filling()
        plain = [unit for unit in gathered if unit.encoded is None]
        here = [unit for unit in plain if not unit.parks]
        if here:
            # The cast is the copy-in, as in ``fill``.
            _torch_private.foreach_copy_([unit.buffer.own for unit in here], [unit.master for unit in here])
        if len(here) < len(plain):
            for unit in plain:
                if unit.parks:
                    unit.fetch()
        pairs = [(unit.buffer.flat, unit.buffer.own) for unit in plain]
        if len(plain) == len(gathered):
            works.append(issued(group.all_gather_many(pairs), "all_gather_many", group, ""))
            continue
        encoded = EncodedUnits(
            group,
            [
                EncodedUnit(unit.encoded, unit.spec, unit.source, unit.buffer.flat)
                for unit in gathered
                if unit.encoded is not None
            ],
        )
        work = issued(group.all_gather_many(pairs + encoded.pairs), "all_gather_many", group, "")
        works.append(encoded.behind(work))
    return works
