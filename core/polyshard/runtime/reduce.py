"""Reductions of gradients: the copies and communications that they take, and the memory that they read.

Which units go in one launch, and when, is planned in ``planning/launches.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple, Protocol

import torch

from .. import _torch_private
from ..errors import CollectiveError
from ..interfaces import BufferRole, Observer, UnitEvent, UnitOperation, UnitSpec, Work
from ..planning import thresholds
from ..planning.groups import ThenAllReduce, ThenToOwners, UnitRanks
from ..planning.launches import Bucket, Buckets, ReduceMode, alike
from ..planning.layout import FlatLayout, contiguous_stride, round_up
from .buffers import Copies, FlatBuffer, copies_into, joined, parts_of, slices_of
from .peers import Audit
from .recorder import Recorder
from .streams import REDUCTIONS_ALIVE, CommStreams, Reduction

_dtype_of = attrgetter("dtype")


class Reducible(Protocol):
    """A unit as its gradients and their reduction see it, which read it anew each time."""

    spec: UnitSpec
    ranks: UnitRanks
    launch_numel: int
    """Elements by which launches are planned: the same on all ranks of the model."""
    observers: tuple[Observer, ...]


class Contribution(NamedTuple):
    """One unit in one reduction. Its input alone holds the gradients, until they are collected."""

    unit: Reducible
    ranks: UnitRanks
    """Among whom: the unit's, or ``among_near`` of these."""
    input: ReductionInput
    places: Sequence[object]
    """The places (``CommStreams.here``) at which the gradients were computed."""
    deliver: Callable[[torch.Tensor], object]
    """Called with the reduced shard (``[shard_numel]``; among near ranks ``[rows * shard_numel]``), where operations
    are ordered behind the reduction.

    Returns the tensors that it added it to, if any."""
    waiting: torch.Tensor | None = None
    """The sum of earlier results among near ranks."""


def kind_of(ranks: UnitRanks, input: ReductionInput) -> Hashable:
    """Equal for units that one communication may reduce."""
    # A plugin's collectives may not be hashable.
    return id(ranks.reduction), id(ranks.replicate), id(ranks.route), input.dtype, input.result_dtype


class Reducer:
    """Takes units' contributions, reduces them over ranks, and calls each one back with its shard.

    Args:
        limit: Bytes that wait at most in one bucket; 0 to send each reduction by itself.
        streams: Runs them beside compute.
        audit: What ranks compare of each reduction.
        recorder: Remembers each communication before it is announced.
    """

    def __init__(
        self,
        limit: int,
        streams: CommStreams,
        audit: Audit,
        recorder: Recorder,
    ) -> None:
        self.streams = streams
        #: Which units go together.
        self.buckets: Buckets[Contribution] = Buckets(limit)
        self._audit = audit
        self._recorder = recorder
        # By the first of its members: backward reaches units in the same order in each step.
        self._merged: dict[ReductionInput, MergedInput] = {}
        self._era = _Era()

    def reduce(self, contribution: Contribution, gradients: list[torch.Tensor | None]) -> None:
        """Reduce ``gradients``, one a parameter or None, now or with those that follow.

        All are issued after ``flush``, and delivered after ``CommStreams.drain``.
        """
        nbytes = contribution.unit.launch_numel * contribution.input.dtype.itemsize
        mode = self.buckets.mode_of(nbytes, contribution.ranks.reduction is not None)
        self._take((contribution,), (gradients,), nbytes, mode)

    def reduce_together(self, units: Sequence[tuple[Contribution, list[torch.Tensor | None]]]) -> None:
        """``reduce`` for each of ``units``, of one module, by as few launches as they may share."""
        for same in alike(units, [kind_of(each.ranks, each.input) for each, _ in units]):
            members, gradients = zip(*same, strict=True)
            whole = members[0].ranks.reduction is None
            if whole or len(members) == 1:
                for each, its in same:
                    self.reduce(each, its)
                continue
            sizes = [each.unit.launch_numel * each.input.dtype.itemsize for each in members]
            self._take(members, gradients, sum(sizes), self.buckets.mode_of_module(sizes, True))

    def _take(
        self,
        members: Sequence[Contribution],
        gradients: Sequence[list[torch.Tensor | None]],
        nbytes: int,
        mode: ReduceMode,
    ) -> None:
        """Let ``members``, of ``nbytes``, wait for others of the same ``mode``, or issue them."""
        for each, its in zip(members, gradients, strict=True):
            input = each.input
            if input.gradients is not None:
                # A unit used twice in one backward.
                self.flush()
            input.gradients = its
            if any(its[index] is None for index in input.claimed):
                input.leave_claimed()
        for bucket in self.buckets.put(kind_of(members[0].ranks, input), members, nbytes, mode):
            self._issue(bucket)

    def flush(self) -> None:
        """Issue the reductions that wait."""
        for bucket in self.buckets.close():
            self._issue(bucket)

    def _issue(self, bucket: Bucket[Contribution]) -> None:
        members, places = bucket.members, list[object]()
        for each in members:
            places += [place for place in each.places if place not in places]
        entry = self._recorder.issue("reduction", [each.unit.spec for each in members], True)
        try:
            with self.streams.between(places):
                # Experts that no token reached are reduced later than those of other groups.
                if (self._audit.announces or self._audit.compares) and members[0].ranks.ep_degree == 1:
                    names = [each.unit.spec.name or "(root)" for each in members]
                    if self._audit.compares:
                        sizes = [(each.unit.launch_numel, each.input.dtype) for each in members]
                        names = [f"{name} ({n} elements of {of})" for name, (n, of) in zip(names, sizes, strict=True)]
                    self.streams.meet(members[0].ranks.world.announce, "reduction of " + ", ".join(names))
                merges = _go_side_by_side(members, bucket.mode)
                launch = self._merge(members) if merges else self._group(members)
                # Inputs have memory from the pool of this stream, or of the one that computed their first gradient.
                deliver = partial(self._finish, launch, self._era)
                self.streams.reduce(Reduction(launch.start, deliver, launch.retire), places)
        except CollectiveError as error:
            self._recorder.refuse(error, entry)

    def open(self, contribution: Contribution) -> None:
        """Give its input memory; called before ``reduce`` where gradients are computed in place."""
        self._make_room(contribution)
        contribution.input.attach(contribution.ranks, self.streams.current())

    def forget(self) -> None:
        """Let reductions in flight end without delivering a result, but for those that ``settle`` let stand."""
        self._era.forgotten = True
        self._era = _Era()

    def settle(self) -> None:
        """Deliver the results of what was issued so far, whatever becomes of later backwards."""
        self._era = _Era()

    def discard(self) -> None:
        """Forget what waits, and release the memory of reductions that failed. Called after ``CommStreams.drain``."""
        self.buckets.close()
        for merged in self._merged.values():
            merged.release()

    def keep_memory(self) -> None:
        """Leave merged memory to reductions that may not have ended; it is freed with the last of them."""
        self._merged.clear()

    def _make_room(self, contribution: Contribution) -> None:
        """Retire earlier reductions, so that one more may be issued."""
        unit = contribution.unit
        for observer in unit.observers:
            observer(UnitEvent(UnitOperation.WAIT, unit.spec))
        self.streams.make_room(0 if contribution.input.travels else REDUCTIONS_ALIVE - 1)
        for observer in unit.observers:
            observer(UnitEvent(UnitOperation.WAIT, unit.spec, begins=False))

    def _group(self, members: Sequence[Contribution]) -> _Launch:
        """A reduction for each of ``members``."""
        inputs = [each.input for each in members]
        buffers = [self._filled_by(each) for each in members]
        copies = joined([input.collect(buffer) for input, buffer in zip(inputs, buffers, strict=True)])
        flats, most = [part for buffer in buffers for part in buffer.parts], thresholds.HELD_NBYTES
        ranks = members[0].ranks
        many = sum(input.nbytes for input in inputs) > most and sum(source.nbytes for source in copies.sources) > most
        if ranks.reduction is None or many:
            copies.run()
            copies.release()
            copies = Copies([], [], [], [])
        if ranks.reduction is None:
            return _Launch(members, flats, list(flats), copies)
        copies.spent.extend(buffers)
        if ranks.behind is None or len(members) == 1:
            shards = [input.new_result(ranks.rows * input.layout.shard_numel) for input in inputs]
            result = shards[0]
        else:
            # Next to each other, so that one communication adds them up over replicas.
            columns = column_sizes(inputs)
            result = inputs[0].new_result(sum(columns))
            if ranks.blends:
                result.zero_()
            shards = shards_in(result, inputs, columns)
        if len(flats) == len(inputs):
            return _Launch(members, flats, shards, copies, result=result)
        # Several segments: each is reduced into its slice, and nothing into what lies between two slices.
        if ranks.rows > 1:
            # Of several rows, segment by segment: they become rows behind the reduction.
            slices = [
                part
                for shard, each in zip(shards, inputs, strict=True)
                for part in parts_of(shard, replace(each.layout, world_size=ranks.rows))
            ]
            return _Launch(members, flats, slices, copies, shards=shards)
        pads = [shard.narrow(0, *pad) for shard, each in zip(shards, inputs, strict=True) for pad in each.layout.pads()]
        if pads:
            _torch_private.foreach_zero_(pads)
        slices = [part for shard, each in zip(shards, inputs, strict=True) for part in slices_of(shard, each.layout)]
        return _Launch(members, flats, slices, copies, result=result, shards=shards)

    def _filled_by(self, contribution: Contribution) -> FlatBuffer:
        """The memory in which its gradients are brought together."""
        input = contribution.input
        if contribution.ranks.reduction is None:
            # Reduced in place, and viewed by ``.grad`` afterwards: memory that lives as long as these views.
            return FlatBuffer(input.new_result(input.layout.padded_numel), input.layout, resizable=False)
        if not input.claimed:
            self.open(contribution)
        return input.buffer

    def _merge(self, members: Sequence[Contribution]) -> _Launch:
        """One reduction for all ``members``."""
        inputs = tuple(each.input for each in members)
        merged = self._merged.get(inputs[0])
        if merged is None or merged.inputs != inputs:
            merged = self._merged[inputs[0]] = MergedInput(inputs, members[0].ranks.shard_size)
        if merged.travels:
            # A backward passed these units twice: their memory serves one reduction at a time.
            self.streams.make_room(0)
        for each in members:
            if each.unit.observers or each.input.travels:
                self._make_room(each)
        self.streams.make_room()
        copies = merged.collect()
        result = inputs[0].new_result(members[0].ranks.rows * merged.numel)
        return _Launch(members, [merged.flat], [result], copies, merged)

    def _finish(self, launch: _Launch, era: _Era) -> object:
        written: list[object] = []
        merged, shards, rows = launch.merged, launch.shards or launch.results, launch.members[0].ranks.rows
        if merged is not None:
            merged.release()
            shards = merged.shards_in(shards[0], rows)
        elif launch.shards and rows > 1:
            shards = [
                _by_rows(shard, each.input.layout, rows) for shard, each in zip(shards, launch.members, strict=True)
            ]
        for each, shard in zip(launch.members, shards, strict=True):
            if not era.forgotten:
                written.append(each.deliver(shard))
            for observer in each.unit.observers:
                observer(UnitEvent(UnitOperation.REDUCE, each.unit.spec, begins=False))
        return written


def _go_side_by_side(members: Sequence[Contribution], mode: ReduceMode) -> bool:
    """Whether one communication reduces all segments of ``members``, and not one for each."""
    if members[0].ranks.reduction is None or members[0].ranks.packs:
        return False
    if mode is ReduceMode.MERGED and len(members) > 1:
        return True
    sizes = [each.input.nbytes for each in members]
    small = max(sizes) <= thresholds.SIDE_BY_SIDE_NBYTES and sum(sizes) <= thresholds.GROUPED_NBYTES
    return small and any(each.input.layout.segments for each in members)


@dataclass(eq=False, slots=True)
class _Era:
    """The time of a backward's reductions."""

    forgotten: bool = False
    """Whether the backward failed, so that what it issued delivers nothing."""


class _Launch(NamedTuple):
    """Reductions of ``members`` that are issued together: one for each segment, or one for all that are ``merged``."""

    members: Sequence[Contribution]
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    copies: Copies
    merged: MergedInput | None = None
    result: torch.Tensor | None = None
    """The memory that ``results`` are ranges of, where replicas add it up."""
    shards: Sequence[torch.Tensor] = ()
    """The result of each member; empty where these are ``results``."""

    def start(self) -> Work:
        for each in self.members:
            for observer in each.unit.observers:
                observer(UnitEvent(UnitOperation.REDUCE, each.unit.spec))
        # Here, on the stream that reduces: compute goes on meanwhile.
        if self.merged is None:
            self.copies.run()
        else:
            self.merged.fill(self.copies)
        first = self.members[0]
        if len(self.inputs) == 1:
            work = first.ranks.reduce(self.results[0], self.inputs[0])
        else:
            work = first.ranks.reduce_many(list(zip(self.results, self.inputs, strict=True)), self.result)
        routed = work.first if isinstance(work, ThenAllReduce) else work
        if isinstance(routed, ThenToOwners):
            routed.waiting = self._waiting_columns(routed.route.rows)
        elif isinstance(work, ThenAllReduce):
            shards = self.shards or self.results
            if self.merged is not None:
                shards = self.merged.shards_in(self.results[0])
            pairs = zip(shards, self.members, strict=True)
            work.waiting = [(shard, each.waiting) for shard, each in pairs if each.waiting is not None]
        return work

    def _waiting_columns(self, rows: int) -> list[tuple[int, torch.Tensor]]:
        """Sums of earlier results (``[rows, n]``), each with its column among those of this launch."""
        found, cursor = list[tuple[int, torch.Tensor]](), 0
        for index, each in enumerate(self.members):
            layout = each.input.layout
            # Merged ones have what lies between segments, too.
            starts, sizes = ((0,), (layout.shard_numel,)) if self.merged else (layout.starts, layout.slices)
            for start, size in zip(starts, sizes, strict=True):
                if each.waiting is not None:
                    found.append((cursor, each.waiting.view(rows, -1).narrow(1, start, size)))
                cursor += self.merged.columns[index] if self.merged else size
        return found

    def retire(self) -> None:
        """Release inputs and gradients, and with this object results: sources of a cast or of a copy to the host."""
        self.copies.release()


class ReductionInput:
    """The gradients of one unit's next reduction: ``[padded_numel]`` elements in the dtype in which they travel.

    Gradients that a backward computed elsewhere are copied. Large linear layers *claim* their range of the memory
    beforehand, and write in place. Under ``no_sync`` all are added up, whole, in a private buffer.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, result_dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        #: The dtype of sums, over microbatches and over ranks.
        self.result_dtype = result_dtype
        self.device = device
        self._buffer: FlatBuffer | None = None
        #: Parameters whose gradients are computed in place.
        self.claimed: set[int] = set()
        self._attached_at: object = None
        #: Of a backward that reduces, one a parameter or None; None before, and when they were collected.
        self.gradients: list[torch.Tensor | None] | None = None
        #: The sum of earlier backwards' gradients, which wait while ``has_sum``.
        self.sum: FlatBuffer | None = None
        self.has_sum = False
        self._sum_missed: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory, on this rank."""
        return self.layout.padded_numel * self.dtype.itemsize

    @property
    def buffer(self) -> FlatBuffer:
        """The memory, of a unit that is sharded: made once, attached by ``attach`` until the reduction is retired."""
        if self._buffer is None:
            self._buffer = FlatBuffer.allocate(self.layout, self.dtype, self.device)
        return self._buffer

    @property
    def travels(self) -> bool:
        """Whether the last reduction still reads ``buffer``."""
        return self._buffer is not None and self._buffer.attached and not self.claimed

    @property
    def sum_travels(self) -> bool:
        """Whether the last reduction of a sum still reads it, and releases its memory."""
        return self.sum is not None and self.sum.attached and not self.has_sum

    @property
    def free(self) -> bool:
        """Whether the first gradient may be computed in place."""
        return not (self.has_sum or self.gradients is not None or self.buffer.attached)

    def attach(self, ranks: UnitRanks, here: object) -> None:
        """Give ``buffer`` memory, from the backend's allocator and the pool of the current stream, ``here``."""
        with (ranks.reduction or ranks.world).allocation(BufferRole.REDUCE, self.buffer.nbytes):
            self.buffer.attach()
        self._attached_at = here

    def claim(self, index: int, here: object) -> torch.Tensor | None:
        """Memory for the gradient of parameter ``index``, computed on the stream ``here``, as a new tensor.

        None where it is not the first of this backward, or is computed on another stream than the first that claimed.
        """
        if self.gradients is not None or index in self.claimed or here is not self._attached_at:
            return None
        self.claimed.add(index)
        return self.buffer.views[index].detach()

    def accumulate(self, gradients: list[torch.Tensor | None]) -> None:
        """Add ``gradients`` to the sum."""
        if self.sum is None:
            self.sum = self.make_sum()
        self._sum_missed = self.missing(gradients)
        self.sum.attach()
        copies = copies_into(self.sum, gradients)
        if not self.has_sum:
            copies.run()
        elif copies.sources:
            _torch_private.foreach_add_(copies.places, copies.sources)
        self.has_sum = True

    def make_sum(self) -> FlatBuffer:
        """Memory for ``sum``."""
        return FlatBuffer.allocate(self.layout, self.result_dtype, self.device)

    def missing(self, gradients: list[torch.Tensor | None]) -> frozenset[int]:
        """The parameters without a gradient, here and in the sum."""
        # Nearly always all have one: found at C speed.
        if not any(map(is_, gradients, repeat(None))):
            return frozenset()
        missed = frozenset(index for index, gradient in enumerate(gradients) if gradient is None)
        return missed & self._sum_missed if self.has_sum else missed

    def new_result(self, numel: int) -> torch.Tensor:
        """Memory for ``numel`` reduced elements, from compute's pool: the next forward has it for activations."""
        return torch.empty(numel, dtype=self.result_dtype, device=self.device)

    def collect(self, buffer: FlatBuffer) -> Copies:
        """The copies that ``buffer`` still lacks; they alone hold the gradients from now on."""
        gradients, self.gradients = self.gradients, None
        assert gradients is not None
        if self.has_sum:
            self.accumulate(gradients)
            assert self.sum is not None
            self.has_sum = False
            return Copies([], [buffer.flat], [self.sum.flat], [self.sum])
        copies = copies_into(buffer, gradients, some_in_place=bool(self.claimed))
        self.claimed.clear()
        return copies

    def leave_claimed(self) -> None:
        """Leave the memory to gradients that autograd still holds: of a use before another one, which it adds up."""
        self.claimed.clear()
        self.keep_memory()

    def keep_memory(self) -> None:
        """Leave the memory to the reduction that reads it and may not have ended."""
        self._buffer = None

    def discard(self) -> None:
        """Release the memory and forget a backward that failed; the sum of earlier ones stays."""
        self.gradients = None
        self.claimed.clear()
        if self._buffer is not None:
            self._buffer.release()


class MergedInput:
    """Memory in which ``inputs`` stand next to each other, rank by rank; made once for units that go together.

    ``ranks``: the number of shards.
    """

    def __init__(self, inputs: Sequence[ReductionInput], ranks: int) -> None:
        self.inputs = inputs
        self.columns = column_sizes(inputs)
        #: Elements of the result.
        self.numel = sum(self.columns)
        sizes = [round_up(each.layout.padded_numel, thresholds.MERGED_ALIGNMENT) for each in inputs]
        with torch.inference_mode(False):
            self.flat = torch.empty(ranks * self.numel, dtype=inputs[0].dtype, device=inputs[0].device)
            # Here gradients are brought together, unit by unit, before they are dealt out to the rows.
            wholes = torch.empty(sum(sizes), dtype=inputs[0].dtype, device=inputs[0].device)
            self._buffers = [
                FlatBuffer(whole.narrow(0, 0, each.layout.padded_numel), each.layout, resizable=False, reduces=True)
                for whole, each in zip(torch.split(wholes, sizes), inputs, strict=True)
            ]
            self._rows = self.flat.view(ranks, self.numel)
            # What stands side by side in a row, unit by unit: its slices of segments, as they lie in a shard, each
            # behind the zeros before it, and zeros at the end. All of it contiguous, as one launch for many needs.
            self._columns: list[list[torch.Tensor]] = []
            for buffer, column in zip(self._buffers, self.columns, strict=True):
                cursor, layout, columns = 0, buffer.layout, list[torch.Tensor]()
                for part, size, start in zip(buffer.parts, layout.slices, layout.starts, strict=True):
                    columns += [self._zeros(start - cursor), part.view(ranks, size)]
                    cursor = start + size
                self._columns.append([*columns, self._zeros(column - cursor)])
        #: Whether the gradients of a unit are its columns as they are: each parameter alone fills a segment.
        self._plain = [_fills_segments(each.layout) for each in inputs]
        self._storage, self._wholes = self.flat.untyped_storage(), wholes.untyped_storage()
        self._nbytes, self._wholes_nbytes = self._storage.nbytes(), self._wholes.nbytes()
        self._wholes.resize_(0)
        self.release()

    def _zeros(self, numel: int) -> torch.Tensor:
        return self.flat.new_zeros(len(self._rows), numel)

    def shards_in(self, result: torch.Tensor, rows: int = 1) -> list[torch.Tensor]:
        """The shard of each of ``inputs`` in ``result`` (``[numel]``), or several of each (``[rows * numel]``)."""
        if rows == 1:
            return shards_in(result, self.inputs, self.columns)
        parts = torch.split(result.view(rows, self.numel), list(self.columns), dim=1)
        return [part[:, : each.layout.shard_numel].flatten() for part, each in zip(parts, self.inputs, strict=True)]

    @property
    def travels(self) -> bool:
        """Whether a reduction is reading the memory."""
        return self._storage.nbytes() > 0

    def release(self) -> None:
        """Take the memory away."""
        self._storage.resize_(0)

    def collect(self) -> Copies:
        """The copies that the inputs still lack."""
        # Where gradients were computed in place, that memory is read like any other.
        in_place = [each.buffer for each in self.inputs if each.claimed]
        # A copy into given memory is no operation that autograd records: gradients with a graph go the other way.
        again, ranks = torch.is_grad_enabled(), len(self._rows)
        found, columns = list[Copies](), list[torch.Tensor]()
        for each, buffer, plain, own in zip(self.inputs, self._buffers, self._plain, self._columns, strict=True):
            copies, start = each.collect(buffer), len(columns)
            columns += own
            complete = plain and copies.places is buffer.views and not again
            if complete and all(map(is_, map(_dtype_of, copies.sources), repeat(each.dtype))):
                # Read where they are: one copy of all gradients less, and no memory for it.
                columns[start + 1 :: 2] = [gradient.reshape(ranks, -1) for gradient in copies.sources]
                copies = Copies([], [], [], copies.spent)
            found.append(copies)
        copies = joined(found)
        copies.spent.extend(in_place)
        return copies._replace(columns=[column for column in columns if column.numel()])

    def fill(self, copies: Copies) -> None:
        """Run ``copies``, and bring the inputs together, on the current stream and in memory from its pool."""
        # The memory of whole units returns there as soon as everything is issued.
        if copies.places or copies.zeroed:
            self._wholes.resize_(self._wholes_nbytes)
            copies.run()
        self._storage.resize_(self._nbytes)
        torch.cat(copies.columns, dim=1, out=self._rows)
        self._wholes.resize_(0)


def _fills_segments(layout: FlatLayout) -> bool:
    """Whether each parameter, in row-major order, is all of one segment, so that each rank's slice is a part of it."""
    slots = layout.slots
    return len(slots) == len(layout.slices) and all(
        slot.numel == size * layout.world_size and not slot.dim and slot.stride == contiguous_stride(slot.shape)
        for slot, size in zip(slots, layout.slices, strict=True)
    )


def column_sizes(inputs: Sequence[ReductionInput]) -> list[int]:
    """Elements that each of ``inputs`` takes of a rank's row, where they stand next to each other."""
    return [round_up(each.layout.shard_numel, thresholds.MERGED_ALIGNMENT) for each in inputs]


def shards_in(result: torch.Tensor, inputs: Sequence[ReductionInput], columns: Sequence[int]) -> list[torch.Tensor]:
    """The shard of each of ``inputs`` in ``result`` (``[sum(columns)]``)."""
    parts = torch.split(result, list(columns))
    return [part[: each.layout.shard_numel] for part, each in zip(parts, inputs, strict=True)]


def _by_rows(parts: torch.Tensor, layout: FlatLayout, rows: int) -> torch.Tensor:
    """``rows`` shards one below the other, of their segments one behind the other (``[rows * shard_numel]``)."""
    found = torch.zeros_like(parts)
    table = found.view(rows, layout.shard_numel)
    segments = parts_of(parts, replace(layout, world_size=rows))
    for start, size, part in zip(layout.starts, layout.slices, segments, strict=True):
        table.narrow(1, start, size).copy_(part.view(rows, size))
    return found
