"""Reductions of units that follow each other, sent together.

[Note: buckets]
A reduction of few bytes takes as long as one of several times as many, and so does the copy that brings few gradients
together, on the device and on the host. So the gradients of small units wait, in the order in which backward brings
them, until the bucket is full, until another kind of unit is reduced, or until backward ends. Then, on the stream that
reduces, one copy brings all of them into their units' inputs, another one writes the inputs next to each other, rank by
rank, and one communication reduces them. Its result is cut into the units' gradient shards.

Units of medium size have enough bytes for a communication, and copying them twice would cost the device more than it
saves. But whatever is launched costs the host, which small batches keep busier than the device. So they wait for each
other as small ones do, and are then brought together by one copy and reduced by one launch of several communications.

What waits for what follows from sizes and order alone, so that all ranks fill their buckets alike.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from ...interfaces import Work
from .. import _torch_private
from ..planning.layout import round_up
from ..planning.ranks import RankGrid
from ..transport.audit import Audit
from ..transport.buffer import FlatBuffer
from ..transport.lanes import Lanes

#: The most bytes that are merged. Longer reductions gain little from each other, and hold all of their memory while
#: they wait; the last one of a backward has nothing left to run beside.
MERGED_NBYTES = 16 * 2**20
#: A unit is merged with others if at least so many inputs of its size fit. Larger ones gain less than the second copy
#: costs.
SHARE = 4
#: The most bytes that go in one launch. A unit of more than half of them computes for longer than launching takes, and
#: waiting would hold the gradients of two.
GROUPED_NBYTES = 64 * 2**20
#: Ranks up to which each rank's part of an input is copied by itself. One launch takes some 64 copies.
_ROWS_TOGETHER = 8
#: In elements. What optimizers and NCCL read in wide accesses begins at multiples of it.
_ALIGNMENT = 128


class Copies(NamedTuple):
    """What brings gradients together. Sources are held until the reduction of what they are copied to is retired."""

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


class PendingReduction(NamedTuple):
    """One unit's reduction, ready to be issued."""

    input: torch.Tensor
    """``[world_size * n]``. Without shards the mean replaces it, and it is ``result`` as well."""
    result: torch.Tensor
    """``[n]``, not written yet."""
    copies: Copies
    """What is still to be written into the input."""


class Way(enum.Enum):
    """How a unit is reduced."""

    ALONE = "alone"
    """At once, by itself."""
    GROUPED = "grouped"
    """By a communication of its own, in one launch with its neighbours'."""
    MERGED = "merged"
    """By one communication with its neighbours."""


class Reducible(Protocol):
    """What a bucket needs of a unit's gradients."""

    grid: RankGrid

    @property
    def label(self) -> str:
        """Its unit's name, for people."""

    @property
    def goes_with(self) -> object:
        """What two units must agree in to be reduced together; None for a unit that never is."""

    @property
    def wire_nbytes(self) -> int:
        """Bytes of its reduction's input."""

    @property
    def input(self) -> FlatBuffer:
        """Its reduction's input. Of units that are reduced together, it has memory while the copies run."""

    def make_room(self, lanes: Lanes) -> None:
        """Retire earlier reductions, so that one more may be issued."""

    def collect(self) -> Copies:
        """What is to be written into its input."""

    @property
    def shard_numel(self) -> int:
        """Elements of its gradient shard."""

    def new_result(self, numel: int) -> torch.Tensor:
        """Memory for ``numel`` reduced elements, from the current stream's pool."""

    def prepare(self, lanes: Lanes) -> PendingReduction:
        """Its reduction, with what it takes in memory."""

    def issue(self, reduction: PendingReduction) -> Work:
        """Start what ``prepare`` returned, by itself."""

    def expect(self, result: torch.Tensor) -> None:
        """``result`` will hold the gradient shard."""

    def starting(self) -> None:
        """The reduction starts at the present point of the current stream."""

    def finish(self) -> None:
        """Hand the result on; the reduction ends at the present point of the current stream."""


class Bucket:
    """The reductions that wait for each other.

    Args:
        limit: bytes that wait at most; 0 to send each reduction by itself.
        lanes: what runs them beside compute.
        audit: compares each unit's with the other ranks', in the first step; None where nothing is compared.
        announce: called with what all ranks reduce next; None where they do not compare it.
    """

    def __init__(
        self, limit: int, lanes: Lanes, *, audit: Audit | None = None, announce: Callable[[str], None] | None = None
    ) -> None:
        self.lanes = lanes
        self.audit = audit
        #: Bytes up to which units that go that way are sent together.
        self.room = {Way.ALONE: 0, Way.GROUPED: min(limit, GROUPED_NBYTES), Way.MERGED: min(limit, MERGED_NBYTES)}
        self._announce = announce
        self._waiting: list[Reducible] = []
        self._nbytes = 0
        self._way = Way.ALONE
        # Where the gradients that wait were computed.
        self._places: list[object] = []
        # By the first of its members: backward brings units in the same order in each step.
        self._merged: dict[Reducible, _Merged] = {}

    def way_of(self, unit: Reducible) -> Way:
        """How ``unit`` is reduced."""
        nbytes = unit.wire_nbytes
        if unit.goes_with is None:
            return Way.ALONE
        if nbytes * SHARE <= self.room[Way.MERGED]:
            return Way.MERGED
        return Way.GROUPED if nbytes * 2 <= self.room[Way.GROUPED] else Way.ALONE

    def reduce(self, unit: Reducible, places: Sequence[object]) -> None:
        """Reduce the gradients that ``unit`` has, computed at ``places``, now or with those that follow."""
        way, nbytes = self.way_of(unit), unit.wire_nbytes
        room = self.room[way]
        if self._waiting and (
            way is not self._way or self._nbytes + nbytes > room or self._waiting[0].goes_with != unit.goes_with
        ):
            self.flush()
        self._way = way
        self._places += [place for place in places if place not in self._places]
        self._waiting.append(unit)
        self._nbytes += nbytes
        if self._nbytes + nbytes > room:
            # The next one is likely of the same size: do not wait for it.
            self.flush()

    def flush(self) -> None:
        """Reduce what waits."""
        members, places = tuple(self._waiting), tuple(self._places)
        self._forget()
        if members:
            if self._announce is not None:
                self._announce("reduction of " + ", ".join(member.label for member in members))
            with self.lanes.between(places):
                if self._way is Way.MERGED and len(members) > 1:
                    self._send_merged(members, places)
                else:
                    _send(members, places, self.lanes)

    def _send_merged(self, members: tuple[Reducible, ...], places: Sequence[object]) -> None:
        merged = self._merged.get(members[0])
        if merged is None or merged.members != members:
            merged = self._merged[members[0]] = _Merged(members)
        if merged.travels:
            # A backward came through these units twice: their memory serves one reduction at a time.
            self.lanes.make_room(0)
        for member in members:
            member.make_room(self.lanes)
        merged.send(places, self.lanes)

    def discard(self) -> None:
        """Forget what waits, and what a reduction that failed left behind. To be called after ``Lanes.drain``."""
        self._forget()
        for merged in self._merged.values():
            merged.release()

    def _forget(self) -> None:
        self._waiting.clear()
        self._places.clear()
        self._nbytes = 0


class _Merged:
    """The inputs of several units as one, and where each has its place; made once for units that go together."""

    def __init__(self, members: tuple[Reducible, ...]) -> None:
        self.members = members
        first = members[0]
        shard = first.grid.shard
        assert shard is not None
        self._columns = [round_up(member.shard_numel, _ALIGNMENT) for member in members]
        self._numel = sum(self._columns)
        self._numels = [member.shard_numel for member in members]
        self._inputs = [member.input for member in members]
        like = self._inputs[0].flat
        # Memory without bytes has no rows.
        bare = [each for each in self._inputs if not each.attached]
        for each in bare:
            each.attach()
        with torch.inference_mode(False):
            self._flat = torch.empty(shard.world_size * self._numel, dtype=like.dtype, device=like.device)
            rows = self._flat.view(shard.world_size, self._numel)
            places = [
                place.narrow(1, 0, numel)
                for place, numel in zip(torch.split(rows, self._columns, dim=1), self._numels, strict=True)
            ]
            parts = [each.flat.view(shard.world_size, -1) for each in self._inputs]
            if shard.world_size <= _ROWS_TOGETHER:
                # Row by row both sides are contiguous, which is what one launch for all of them needs.
                places = [row for place in places for row in place.unbind()]
                parts = [row for part in parts for row in part.unbind()]
            self._places, self._parts = places, parts
        self._storage = self._flat.untyped_storage()
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

    def send(self, places: Sequence[object], lanes: Lanes) -> None:
        """Reduce what the members have, computed at ``places``."""
        copies = _together(member.collect() for member in self.members)
        # Those that a gradient was computed in.
        copies.spent.extend(each for each in self._inputs if each.attached)
        result = self.members[0].new_result(self._numel)
        for member, part, numel in zip(self.members, torch.split(result, self._columns), self._numels, strict=True):
            member.expect(part[:numel])
        lanes.reduce(partial(self._start, result, copies), self._finish, partial(self._retire, result, copies), places)

    def _start(self, result: torch.Tensor, copies: Copies) -> Work:
        for member in self.members:
            member.starting()
        # From the pool of the stream that reduces, and back to it as soon as everything is issued there.
        inputs = [each for each in self._inputs if not each.attached]
        for each in inputs:
            each.attach()
        copies.run()
        self._storage.resize_(self._nbytes)
        _torch_private.foreach_copy_(self._places, self._parts)
        for each in inputs:
            each.release()
        return self.members[0].grid.reduce(result, self._flat)

    def _finish(self) -> None:
        self.release()
        _finish(self.members)

    def _retire(self, result: torch.Tensor, copies: Copies) -> None:
        """Let go of both. ``result`` was the source of a cast, or of a copy to the host."""
        copies.let_go()


def _send(members: tuple[Reducible, ...], places: Sequence[object], lanes: Lanes) -> None:
    """Reduce what ``members`` have, computed at ``places``, each by itself and all in one launch."""
    pending = [member.prepare(lanes) for member in members]
    # Inputs were given memory here, or where the first gradient in them was computed.
    lanes.reduce(partial(_start, members, pending), partial(_finish, members), partial(_retire, pending), places)


def _start(members: tuple[Reducible, ...], pending: Sequence[PendingReduction]) -> Work:
    for member in members:
        member.starting()
    # Here, on the stream that reduces: compute goes on meanwhile.
    _together(each.copies for each in pending).run()
    if len(members) == 1:
        return members[0].issue(pending[0])
    return members[0].grid.reduce_many([(each.result, each.input) for each in pending])


def _finish(members: tuple[Reducible, ...]) -> None:
    for member in members:
        member.finish()


def _retire(pending: Sequence[PendingReduction]) -> None:
    """Let go of inputs, gradients, and results, which were sources of a cast or of a copy to the host."""
    for each in pending:
        each.copies.let_go()


def _together(copies: Iterable[Copies]) -> Copies:
    return Copies(*(list(chain.from_iterable(kind)) for kind in zip(*copies, strict=True)))
