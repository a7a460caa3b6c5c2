"""The memory that holds whole units, and views of it: segments, rank by rank, and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from .. import _torch_private
from ..interfaces import BufferRole, Collectives
from ..planning.layout import FlatLayout, Slot


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
        secondary_ranks: Collectives | None = None,
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
        #: What this rank has of it for gathers among ``secondary_ranks``; None where that is nothing.
        self.secondary = None if secondary_ranks is None else SecondaryShard(flat, layout, outs, secondary_ranks)
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
        secondary_ranks: Collectives | None = None,
    ) -> FlatBuffer:
        """A buffer that starts released. ``gathers``: gathers fill it, and not reductions.

        ``secondary_ranks``: ranks among which it is gathered from secondary shards.
        """
        # Built inside an inference pass, views would refuse autograd for the rest of their life.
        with torch.inference_mode(False):
            flat = torch.empty(layout.padded_numel, dtype=dtype, device=device)
            buffer = cls(flat, layout, resizable=True, rank=rank, reduces=not gathers, secondary_ranks=secondary_ranks)
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

    @property
    def versions(self) -> list[int]:
        """What ``versioned`` count now: other numbers once a program wrote to them in place."""
        return [tensor._version for tensor in self.versioned]

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


class Copies(NamedTuple):
    """Copies that are still to run. They hold their sources until the reduction of their targets is retired."""

    zeroed: list[torch.Tensor]
    """Ranges without a gradient."""
    places: list[torch.Tensor]
    sources: list[torch.Tensor]
    """One gradient for each of ``places``."""
    spent: list[FlatBuffer]
    """Buffers that nothing reads any more once the reduction is retired."""
    columns: list[torch.Tensor] | tuple[()] = ()
    """Of a merged reduction: what stands side by side in its input, each ``[ranks, n]``. Gradients that need no other
    form are among them."""

    def run(self) -> None:
        """Write everything, by two launches at most."""
        if self.zeroed:
            _torch_private.foreach_zero_(self.zeroed)
        if self.sources:
            _torch_private.foreach_copy_(self.places, self.sources)

    def release(self) -> None:
        """Release the buffers that are spent."""
        for buffer in self.spent:
            buffer.release()


def joined(copies: Sequence[Copies]) -> Copies:
    if len(copies) == 1:
        return copies[0]
    return Copies(*(list(chain.from_iterable(kind)) for kind in zip(*copies, strict=True)))


def copies_into(buffer: FlatBuffer, gradients: list[torch.Tensor | None], *, some_in_place: bool = False) -> Copies:
    """The copies of ``gradients`` that ``buffer`` lacks, one a view: None for zeros; some may be computed in place."""
    if buffer.ranked:
        gradients = buffer.rank_by_rank(gradients)
    zeroed, present = list(buffer.gaps), [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients) and not some_in_place:
        return Copies(zeroed, buffer.views, present, [])
    copies = Copies(zeroed, [], [], [])
    for view, gradient in zip(buffer.views, gradients, strict=True):
        if gradient is None:
            # An unused parameter, on this rank or on all: its range is zero.
            zeroed.append(view)
        elif not some_in_place or gradient.data_ptr() != view.data_ptr():
            copies.places.append(view)
            copies.sources.append(gradient)
    return copies


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


class SecondaryShard:
    """The part of a gather buffer from which neighbours gather it, in memory of its own.

    Rank ``j`` of ``n`` neighbours has the ``j``-th of ``n`` equal parts of each segment. These are slices of several
    ranks, one behind the other, so that a gather among the neighbours fills the segment as one among all ranks does.
    Whole shards lie one below the other in the memory (``[rows, shard_numel]``), as they are sent.
    """

    def __init__(
        self, flat: torch.Tensor, layout: FlatLayout, outs: Sequence[torch.Tensor], secondary_ranks: Collectives
    ) -> None:
        """``outs``: what gathers fill, one a segment of ``flat``."""
        number, rank = secondary_ranks.world_size, secondary_ranks.rank
        rows = layout.world_size // number
        self.memory = torch.empty(rows * layout.shard_numel, dtype=flat.dtype, device=flat.device)
        #: What it has of each segment: ``[rows, slice]``, or ``[rows, *piece]`` where staged.
        self.slices = columns_of(self.memory.view(rows, layout.shard_numel), layout)
        sizes = [out.numel() // number for out in outs]
        owns = [out.narrow(0, rank * size, size) for out, size in zip(outs, sizes, strict=True)]
        #: What a gather among the neighbours fills, one a segment, and this rank's part of it.
        self.pairs = list(zip(outs, owns, strict=True))
        #: These parts, as ``slices`` are.
        self.owns = [own.view(each.shape) for own, each in zip(owns, self.slices, strict=True)]
        self._parts = [part.narrow(0, rank * rows, rows) for part in by_rank(flat, layout)]
        self._storage = self.memory.untyped_storage()
        #: Bytes while they are kept.
        self.nbytes = self._storage.nbytes()
        self.release()

    def attach(self) -> None:
        """Take memory from the current stream's pool. Nothing happens if it has some."""
        if not self._storage.nbytes():
            self._storage.resize_(self.nbytes)

    def fill(self) -> None:
        """Take memory, and copy the part of the buffer there."""
        self.attach()
        _torch_private.foreach_copy_(self.slices, self._parts)

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
