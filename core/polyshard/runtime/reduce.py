"""What one unit's next reduction reads: its gradients as they come, and the memory that brings them together."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby, repeat
from operator import is_
from typing import NamedTuple

import torch

from .. import _torch_private
from ..interfaces import COMPLETED, BufferRole, Observer, UnitSpec, Work
from ..planning import thresholds
from ..planning.groups import RankGrid
from ..planning.layout import FlatLayout, round_up
from .gather import FlatBuffer
from .peers import Audit
from .recorder import Recorder
from .streams import REDUCTIONS_ALIVE, CommStreams, Reduction


class Copies(NamedTuple):
    """Copies still to be run. Sources are held until the reduction of what they are copied to is retired."""

    zeroed: list[torch.Tensor]
    """Ranges without a gradient."""
    places: list[torch.Tensor]
    sources: list[torch.Tensor]
    """One gradient for each of ``places``."""
    spent: list[FlatBuffer]
    """Buffers that nothing reads any more once the reduction is retired."""

    def run(self) -> None:
        """Write all of it, by two launches at most."""
        if self.zeroed:
            _torch_private.foreach_zero_(self.zeroed)
        if self.sources:
            _torch_private.foreach_copy_(self.places, self.sources)

    def let_go(self) -> None:
        """Release what is spent."""
        for buffer in self.spent:
            buffer.release()


class ReductionInput:
    """``[padded_numel]`` elements in the dtype in which they travel, and where they come from.

    Gradients that a backward computed elsewhere are copied. Large linear layers *claim* their part of the memory
    beforehand, and write in place. Under ``no_sync`` all are added up, whole, in a private buffer.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, result_dtype: torch.dtype, device: torch.device) -> None:
        self.layout = layout
        self.dtype = dtype
        #: In which they are added up, over microbatches and over ranks.
        self.result_dtype = result_dtype
        self.device = device
        self._buffer: FlatBuffer | None = None
        #: Which parameters' gradients are computed in place.
        self.claimed: set[int] = set()
        self._taken_at: object = None
        #: Of a backward that reduces, one a parameter or None; None before, and when they were collected.
        self.gradients: list[torch.Tensor | None] | None = None
        #: Where earlier backwards' gradients are added up; they wait while ``has_sum``.
        self.sum: FlatBuffer | None = None
        self.has_sum = False
        self._sum_missed: frozenset[int] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
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
    def free(self) -> bool:
        """Whether the first gradient may be computed in place."""
        return not (self.has_sum or self.gradients is not None or self.buffer.attached)

    def attach(self, grid: RankGrid, here: object) -> None:
        """Give ``buffer`` memory, from the backend's allocator and the pool of the current stream, ``here``."""
        with (grid.shard or grid.world).allocation(BufferRole.REDUCE, self.buffer.nbytes):
            self.buffer.attach()
        self._taken_at = here

    def claim(self, index: int, here: object) -> torch.Tensor | None:
        """Where the gradient of parameter ``index`` may be written on the stream ``here``, as a new tensor.

        None where it is not the first of this backward, or is computed on another stream than the first that claimed.
        """
        if self.gradients is not None or index in self.claimed or here is not self._taken_at:
            return None
        self.claimed.add(index)
        return self.buffer.views[index].detach()

    def accumulate(self, gradients: list[torch.Tensor | None]) -> None:
        """Add ``gradients`` to those that wait."""
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
        """Memory to add up in."""
        return FlatBuffer.allocate(self.layout, self.result_dtype, self.device)

    def missing(self, gradients: list[torch.Tensor | None]) -> frozenset[int]:
        """Which parameters have none, here or among those that wait."""
        # Nearly always none is missing, which is found out at C speed.
        if not any(map(is_, gradients, repeat(None))):
            return frozenset()
        missed = frozenset(index for index, gradient in enumerate(gradients) if gradient is None)
        return missed & self._sum_missed if self.has_sum else missed

    def new_result(self, numel: int) -> torch.Tensor:
        """Memory for ``numel`` reduced elements.

        From the pool of the stream that computes: what one step uses for gradients, the next has for activations.
        """
        return torch.empty(numel, dtype=self.result_dtype, device=self.device)

    def collect(self, buffer: FlatBuffer) -> Copies:
        """What is still to be written into ``buffer``; these copies alone hold the gradients from now on."""
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

    def keep_memory(self) -> None:
        """Leave alone what a reduction on its way reads; it goes with that."""
        self._buffer = None

    def discard(self) -> None:
        """Release the memory and forget a backward that failed; what earlier ones left waits on."""
        self.gradients = None
        self.claimed.clear()
        if self._buffer is not None:
            self._buffer.release()


def together(copies: Sequence[Copies]) -> Copies:
    """All of ``copies`` as one."""
    if len(copies) == 1:
        return copies[0]
    return Copies(*(list(chain.from_iterable(kind)) for kind in zip(*copies, strict=True)))


def copies_into(buffer: FlatBuffer, gradients: list[torch.Tensor | None], *, some_in_place: bool = False) -> Copies:
    """What ``buffer`` lacks of ``gradients``, one a view: None for zeros, and some perhaps computed there."""
    zeroed, present = list(buffer.gaps), [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients) and not some_in_place:
        return Copies(zeroed, buffer.views, present, [])
    copies = Copies(zeroed, [], [], [])
    for view, gradient in zip(buffer.views, gradients, strict=True):
        if gradient is None:
            # A parameter that took no part: its range is zero, on this rank or on all.
            zeroed.append(view)
        elif not some_in_place or gradient.data_ptr() != view.data_ptr():
            copies.places.append(view)
            copies.sources.append(gradient)
    return copies


# The inputs of several units as one.


class Merged:
    """Memory in which ``inputs`` stand next to each other, rank by rank; made once for units that go together.

    ``ranks``: among how many the units are sharded. ``clean``: whether what lies between the units is zero.
    """

    def __init__(self, inputs: Sequence[ReductionInput], ranks: int, *, clean: bool) -> None:
        self.inputs = inputs
        self._columns = columns_of(inputs)
        #: Elements of the result.
        self.numel = sum(self._columns)
        self._buffers = [each.buffer for each in inputs]
        # Memory without bytes has no rows.
        bare = [each for each in self._buffers if not each.attached]
        for each in bare:
            each.attach()
        with torch.inference_mode(False):
            self.flat = torch.empty(ranks * self.numel, dtype=inputs[0].dtype, device=inputs[0].device)
            rows = self.flat.view(ranks, self.numel)
            columns = torch.split(rows, self._columns, dim=1)
            places = [each[:, : of.layout.shard_numel] for each, of in zip(columns, inputs, strict=True)]
            parts = [each.flat.view(ranks, -1) for each in self._buffers]
            # An operation more, which only those pay that need it.
            gaps = [each[:, of.layout.shard_numel :] for each, of in zip(columns, inputs, strict=True)] if clean else []
            self._gaps = [gap for gap in gaps if gap.numel()]
            if ranks <= thresholds.ROWS_TOGETHER:
                # Row by row both sides are contiguous, which is what one launch for all of them needs.
                places = [row for place in places for row in place.unbind()]
                parts = [row for part in parts for row in part.unbind()]
            self._places, self._parts = places, parts
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        for each in bare:
            each.release()
        self.release()

    @property
    def travels(self) -> bool:
        """Whether a reduction is reading the memory."""
        return self._storage.nbytes() > 0

    def release(self) -> None:
        """Take the memory away, wherever it came from."""
        self._storage.resize_(0)

    def collect(self) -> Copies:
        """What is still to be written into the inputs."""
        copies = together([each.collect(buffer) for each, buffer in zip(self.inputs, self._buffers, strict=True)])
        # Those that a gradient was computed in.
        copies.spent.extend(each for each in self._buffers if each.attached)
        return copies

    def fill(self, copies: Copies) -> None:
        """Run ``copies``, and bring the inputs together, on the current stream and in memory from its pool."""
        # The inputs' goes back there as soon as everything is issued.
        bare = [each for each in self._buffers if not each.attached]
        for each in bare:
            each.attach()
        copies.run()
        self._storage.resize_(self._nbytes)
        _torch_private.foreach_copy_(self._places, self._parts)
        if self._gaps:
            _torch_private.foreach_zero_(self._gaps)
        for each in bare:
            each.release()

    def cut(self, result: torch.Tensor) -> list[torch.Tensor]:
        """The units' gradient shards in ``result`` (``[numel]``)."""
        return cut(result, self.inputs, self._columns)


def columns_of(inputs: Sequence[ReductionInput]) -> list[int]:
    """Elements that each of ``inputs`` takes of a rank's part, where they stand next to each other."""
    return [round_up(each.layout.shard_numel, thresholds.MERGED_ALIGNMENT) for each in inputs]


def cut(result: torch.Tensor, inputs: Sequence[ReductionInput], columns: Sequence[int]) -> list[torch.Tensor]:
    """The shard of each of ``inputs`` in ``result`` (``[sum(columns)]``)."""
    parts = torch.split(result, list(columns))
    return [part[: each.layout.shard_numel] for part, each in zip(parts, inputs, strict=True)]


# Reductions: in which order they are issued, which of them go together, and the memory that they take.
#
# [Note: buckets]
# A reduction of few bytes takes as long as one of several times as many, and so does the copy that brings few gradients
# together, on the device and on the host. So the gradients of small units wait, in the order in which backward brings
# them, until the bucket is full, until another kind of unit is reduced, or until backward ends. Then, on the stream that
# reduces, one copy brings all of them into their units' inputs, another one writes the inputs next to each other, rank by
# rank, and one communication reduces them. Its result is cut into the units' gradient shards.
#
# Units of medium size have enough bytes for a communication, and copying them twice would cost the device more than it
# saves. But whatever is launched costs the host, which small batches keep busier than the device. So they wait for each
# other as small ones do, and are then brought together by one copy and reduced by one launch of several communications.
#
# A module may have several units, whose gradients come at once. They go in one launch whatever their sizes: one by one,
# the first reduction would have to end before the third unit's input gets memory, with nothing to compute beside it.
#
# What waits for what follows from sizes and order alone, so that all ranks fill their buckets alike.


#: Called on the stream that reduces, in the place of the mean over ranks: takes ``[padded_numel]``, which it may
#: overwrite, and returns the reduced ``[shard_numel]``.
CommHook = Callable[[torch.Tensor], torch.Tensor]


class Contribution(NamedTuple):
    """One unit's part in one reduction. Its gradients are held by its input alone, until they are collected."""

    spec: UnitSpec
    grid: RankGrid
    input: ReductionInput
    places: Sequence[object]
    """Where the gradients were computed, as ``CommStreams.here`` says."""
    observers: tuple[Observer, ...]
    comm_hook: CommHook | None
    deliver: Callable[[torch.Tensor], None]
    """Called with the reduced shard (``[shard_numel]``), where operations are ordered behind the reduction."""

    @property
    def goes_with(self) -> object:
        """What units that have shards must agree in to be reduced together."""
        return self.grid.shard, self.grid.replicate, self.input.dtype, self.input.result_dtype


class Way(enum.Enum):
    """How a unit is reduced."""

    ALONE = "alone"
    """At once, by itself."""
    GROUPED = "grouped"
    """By a communication of its own, in one launch with its neighbours'."""
    MERGED = "merged"
    """By one communication with its neighbours."""


class Reducer:
    """Takes units' contributions, reduces them over ranks, and calls each one back with its shard.

    Args:
        limit: bytes that wait at most; 0 to send each reduction by itself.
        communication streams: what runs them beside compute.
        audit: compares each unit's with the other ranks', in the first step; None where nothing is compared.
        recorder: told of each communication before it is announced.
        announce: called with what all ranks reduce next; None where they do not compare it.
    """

    def __init__(
        self,
        limit: int,
        streams: CommStreams,
        *,
        audit: Audit | None = None,
        announce: Callable[[str], None] | None = None,
        recorder: Recorder,
    ) -> None:
        self.streams = streams
        self.audit = audit
        grouped, merged = min(limit, thresholds.GROUPED_NBYTES), min(limit, thresholds.MERGED_NBYTES)
        #: Bytes up to which units that go that way are sent together.
        self.room = {Way.ALONE: 0, Way.GROUPED: grouped, Way.MERGED: merged}
        self._announce = announce
        self._recorder = recorder
        self._waiting: list[Contribution] = []
        self._nbytes = 0
        self._way = Way.ALONE
        # Where the gradients that wait were computed.
        self._places: list[object] = []
        # By the first of its members: backward brings units in the same order in each step.
        self._merged: dict[ReductionInput, Merged] = {}
        # What is issued in one era is delivered in no other.
        self._era = object()

    def way_of(self, nbytes: int, grid: RankGrid) -> Way:
        """How a unit with an input of ``nbytes`` is reduced over ``grid``."""
        if grid.shard is None:
            return Way.ALONE
        if nbytes * thresholds.FEWEST_MERGED <= self.room[Way.MERGED]:
            return Way.MERGED
        return Way.GROUPED if nbytes * 2 <= self.room[Way.GROUPED] else Way.ALONE

    def reduce(self, contribution: Contribution, gradients: list[torch.Tensor | None]) -> None:
        """Reduce ``gradients``, one a parameter or None, now or with those that follow.

        All are issued after ``flush``, and delivered after ``CommStreams.drain``.
        """
        nbytes = contribution.input.nbytes
        way = Way.ALONE if contribution.comm_hook is not None else self.way_of(nbytes, contribution.grid)
        self._take((contribution,), (gradients,), nbytes, way)

    def reduce_together(self, parts: Sequence[tuple[Contribution, list[torch.Tensor | None]]]) -> None:
        """``reduce`` for each of ``parts``, of units of one module, by as few launches as they may share."""
        for _, same in groupby(parts, lambda part: part[0].goes_with):
            members, gradients = zip(*same, strict=True)
            whole = members[0].grid.shard is None
            if whole or len(members) == 1 or any(each.comm_hook is not None for each in members):
                for each, its in zip(members, gradients, strict=True):
                    self.reduce(each, its)
                continue
            sizes = [each.input.nbytes for each in members]
            self._take(members, gradients, sum(sizes), self.way_together(sizes, members[0].grid))

    def way_together(self, sizes: Sequence[int], grid: RankGrid) -> Way:
        """How units of one module, with inputs of ``sizes`` bytes, are reduced over ``grid``."""
        if len(sizes) == 1 or grid.shard is None:
            return self.way_of(max(sizes), grid)
        merges = sum(sizes) <= self.room[Way.MERGED] and self.way_of(max(sizes), grid) is Way.MERGED
        return Way.MERGED if merges else Way.GROUPED

    def _take(
        self,
        members: Sequence[Contribution],
        gradients: Sequence[list[torch.Tensor | None]],
        nbytes: int,
        way: Way,
    ) -> None:
        """Let ``members``, of ``nbytes``, wait for others that go the same ``way``, or issue them."""
        for each, its in zip(members, gradients, strict=True):
            input = each.input
            if input.gradients is not None:
                # A unit used twice in one backward.
                self.flush()
            input.gradients = its
            if self.audit is not None:
                what = each.spec.label, "reduce", input.layout.padded_numel, input.dtype
                with self._recorder.during("comparison of a reduction", (each.spec,), True):
                    self.streams.meet(self.audit.agree, each.grid.world, *what)
        room = self.room[way]
        if self._waiting and (
            way is not self._way or self._nbytes + nbytes > room or self._waiting[0].goes_with != members[0].goes_with
        ):
            self.flush()
        self._way = way
        for each in members:
            self._places += [place for place in each.places if place not in self._places]
        self._waiting += members
        self._nbytes += nbytes
        if self._nbytes + nbytes > room:
            # What comes next is likely of the same size: do not wait for it.
            self.flush()

    def flush(self) -> None:
        """Issue what waits."""
        members, places = tuple(self._waiting), tuple(self._places)
        self._forget_waiting()
        if not members:
            return
        entry = self._recorder.issue("reduction", [each.spec for each in members], True)
        with self._recorder.placing(entry), self.streams.between(places):
            if self._announce is not None:
                names = ", ".join(each.spec.name or "(root)" for each in members)
                self.streams.meet(self._announce, "reduction of " + names)
            merges = self._way is Way.MERGED and len(members) > 1
            launch = self._merge(members) if merges else self._group(members)
            # Inputs were given memory here, or where the first gradient in them was computed.
            deliver = partial(self._finish, launch, self._era)
            self.streams.reduce(Reduction(launch.start, deliver, launch.retire), places)

    def open(self, contribution: Contribution) -> None:
        """Give its input memory; to be called before ``reduce`` where gradients are computed in place."""
        self._make_room(contribution)
        contribution.input.attach(contribution.grid, self.streams.here())

    def forget(self) -> None:
        """Let reductions in flight end without a result."""
        self._era = object()

    def discard(self) -> None:
        """Forget what waits, and what a reduction that failed left behind. To be called after ``CommStreams.drain``."""
        self._forget_waiting()
        for merged in self._merged.values():
            merged.release()

    def keep_memory(self) -> None:
        """Leave alone what reductions on their way read and write: they may not have ended when all else is given up.

        It goes with the last of them.
        """
        self._merged.clear()

    def _forget_waiting(self) -> None:
        self._waiting.clear()
        self._places.clear()
        self._nbytes = 0

    def _make_room(self, contribution: Contribution) -> None:
        """Retire earlier reductions, so that one more may be issued."""
        for observer in contribution.observers:
            observer.wait(contribution.spec)
        self.streams.make_room(0 if contribution.input.travels else REDUCTIONS_ALIVE - 1)
        for observer in contribution.observers:
            observer.waited(contribution.spec)

    def _group(self, members: Sequence[Contribution]) -> _Launch:
        """A reduction for each of ``members``."""
        inputs = [each.input for each in members]
        buffers = [self._filled_by(each) for each in members]
        copies = together([input.collect(buffer) for input, buffer in zip(inputs, buffers, strict=True)])
        flats, most = [buffer.flat for buffer in buffers], thresholds.HELD_NBYTES
        grid = members[0].grid
        many = sum(input.nbytes for input in inputs) > most and sum(source.nbytes for source in copies.sources) > most
        if grid.shard is None or many:
            copies.run()
            copies.let_go()
            copies = Copies([], [], [], [])
        if grid.shard is None:
            return _Launch(members, flats, list(flats), copies)
        copies.spent.extend(buffers)
        if grid.replicate is None or len(members) == 1:
            return _Launch(members, flats, [input.new_result(input.layout.shard_numel) for input in inputs], copies)
        # Next to each other, so that one communication adds them up over replicas.
        columns = columns_of(inputs)
        result = inputs[0].new_result(sum(columns))
        if grid.blends:
            result.zero_()
        return _Launch(members, flats, cut(result, inputs, columns), copies, result=result)

    def _filled_by(self, contribution: Contribution) -> FlatBuffer:
        """The memory in which its gradients are brought together."""
        input = contribution.input
        if contribution.grid.shard is None:
            # Reduced in place, and then what ``.grad`` views: not memory that comes and goes.
            return FlatBuffer(input.new_result(input.layout.padded_numel), input.layout, resizable=False)
        if not input.claimed:
            self.open(contribution)
        return input.buffer

    def _merge(self, members: Sequence[Contribution]) -> _Launch:
        """One reduction for all ``members``."""
        inputs = tuple(each.input for each in members)
        merged = self._merged.get(inputs[0])
        if merged is None or merged.inputs != inputs:
            merged = self._merged[inputs[0]] = Merged(inputs, members[0].grid.shard_size, clean=members[0].grid.blends)
        if merged.travels:
            # A backward came through these units twice: their memory serves one reduction at a time.
            self.streams.make_room(0)
        for each in members:
            self._make_room(each)
        copies = merged.collect()
        return _Launch(members, [merged.flat], [inputs[0].new_result(merged.numel)], copies, merged)

    def _finish(self, launch: _Launch, era: object) -> None:
        merged, shards = launch.merged, launch.results
        if merged is not None:
            merged.release()
            shards = merged.cut(shards[0])
        for each, shard in zip(launch.members, shards, strict=True):
            if era is self._era:
                each.deliver(shard)
            for observer in each.observers:
                observer.reduced(each.spec)


class _Launch(NamedTuple):
    """Reductions of ``members`` that are issued together: one for each, or one for all that are ``merged``."""

    members: Sequence[Contribution]
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]
    copies: Copies
    merged: Merged | None = None
    result: torch.Tensor | None = None
    """What ``results`` are parts of, where replicas add it up."""

    def start(self) -> Work:
        for each in self.members:
            for observer in each.observers:
                observer.reduce(each.spec)
        # Here, on the stream that reduces: compute goes on meanwhile.
        if self.merged is None:
            self.copies.run()
        else:
            self.merged.fill(self.copies)
        first = self.members[0]
        if first.comm_hook is not None:
            self.results[0] = first.comm_hook(self.inputs[0])
            return COMPLETED
        if len(self.inputs) == 1:
            return first.grid.reduce(self.results[0], self.inputs[0])
        return first.grid.reduce_many(list(zip(self.results, self.inputs, strict=True)), self.result)

    def retire(self) -> None:
        """Let go of inputs, gradients, and results, which were sources of a cast or of a copy to the host."""
        self.copies.let_go()
