"""Reductions: in which order they are issued, which of them go together, and the memory that they take.

[Note: buckets]
A reduction of few bytes takes as long as one of several times as many, and so does the copy that brings few gradients
together, on the device and on the host. So the gradients of small units wait, in the order in which backward brings
them, until the bucket is full, until another kind of unit is reduced, or until backward ends. Then, on the stream that
reduces, one copy brings all of them into their units' inputs, another one writes the inputs next to each other, rank by
rank, and one communication reduces them. Its result is cut into the units' gradient shards.

Units of medium size have enough bytes for a communication, and copying them twice would cost the device more than it
saves. But whatever is launched costs the host, which small batches keep busier than the device. So they wait for each
other as small ones do, and are then brought together by one copy and reduced by one launch of several communications.

A module may have several units, whose gradients come at once. They go in one launch whatever their sizes: one by one,
the first reduction would have to end before the third unit's input gets memory, with nothing to compute beside it.

What waits for what follows from sizes and order alone, so that all ranks fill their buckets alike.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from ...interfaces import COMPLETED, Observer, UnitSpec, Work
from .. import thresholds
from ..planning.ranks import RankGrid
from ..transport.audit import Audit
from ..transport.buffer import FlatBuffer
from ..transport.lanes import REDUCTIONS_ALIVE, Lanes, Reduction
from ..transport.recorder import Recorder
from .merged import Merged, columns_of, cut
from .reduction_input import Copies, ReductionInput, together

#: Called on the stream that reduces, in the place of the mean over ranks: takes ``[padded_numel]``, which it may
#: overwrite, and returns the reduced ``[shard_numel]``.
CommHook = Callable[[torch.Tensor], torch.Tensor]


class Contribution(NamedTuple):
    """One unit's part in one reduction. Its gradients are held by its input alone, until they are collected."""

    spec: UnitSpec
    grid: RankGrid
    input: ReductionInput
    places: Sequence[object]
    """Where the gradients were computed, as ``Lanes.here`` says."""
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
        lanes: what runs them beside compute.
        audit: compares each unit's with the other ranks', in the first step; None where nothing is compared.
        recorder: told of each communication before it is announced.
        announce: called with what all ranks reduce next; None where they do not compare it.
    """

    def __init__(
        self,
        limit: int,
        lanes: Lanes,
        *,
        audit: Audit | None = None,
        announce: Callable[[str], None] | None = None,
        recorder: Recorder,
    ) -> None:
        self.lanes = lanes
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

        All are issued after ``flush``, and delivered after ``Lanes.drain``.
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
                    self.lanes.meet(self.audit.agree, each.grid.world, *what)
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
        with self._recorder.placing(entry), self.lanes.between(places):
            if self._announce is not None:
                names = ", ".join(each.spec.name or "(root)" for each in members)
                self.lanes.meet(self._announce, "reduction of " + names)
            merges = self._way is Way.MERGED and len(members) > 1
            launch = self._merge(members) if merges else self._group(members)
            # Inputs were given memory here, or where the first gradient in them was computed.
            deliver = partial(self._finish, launch, self._era)
            self.lanes.reduce(Reduction(launch.start, deliver, launch.retire), places)

    def open(self, contribution: Contribution) -> None:
        """Give its input memory; to be called before ``reduce`` where gradients are computed in place."""
        self._make_room(contribution)
        contribution.input.attach(contribution.grid, self.lanes.here())

    def forget(self) -> None:
        """Let reductions in flight end without a result."""
        self._era = object()

    def discard(self) -> None:
        """Forget what waits, and what a reduction that failed left behind. To be called after ``Lanes.drain``."""
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
        self.lanes.make_room(0 if contribution.input.travels else REDUCTIONS_ALIVE - 1)
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
            self.lanes.make_room(0)
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
