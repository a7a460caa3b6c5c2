"""In which order stages ran, and which come next.

Collectives are issued in an order that follows from recorded order alone, never from timing, so that every rank that
runs the same program prefetches alike.

[Note: batches]
Small stages that follow each other are gathered together, since a gather of few bytes takes as long as one of several
times as many. The recorded order is divided into batches once, by the stages' sizes alone, and whoever asks for a stage
gets the rest of its batch with it. So a batch is issued when the first of its stages is, and all ranks divide alike. It
is asked for as soon as the batch before it is entered, not with that one's last stage: it then has as much compute to
travel beside as it has bytes, where links are slow.

Compute waits for the whole of a batch before it enters its first stage, and all of a batch takes memory at once. So
one has no more stages than a number from which on the host gains little by fewer launches.

[Note: routes]
Not every forward takes the same way: an encoder and a decoder that are called in turns, a mixture whose blocks change
places, an evaluation that skips one. A few recorded orders are kept, the last ones that were taken. A forward is
expected to take the one that last came after the order before it, so that orders that alternate are foreseen from their
first stage. Where it departs, another order that begins with what was entered so far is followed from there on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..planning import thresholds


class Gathered(Protocol):
    """What a schedule needs to know of a stage."""

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of its gather buffers."""

    @property
    def is_part(self) -> bool:
        """Whether it was split off the stage around it."""


S = TypeVar("S", bound=Gathered)

#: The most orders that are kept. A forward that departs compares its beginning with each.
MOST_ROUTES = 8


def batch_ends(sizes: Sequence[int], limit: int) -> list[int]:
    """For each of ``sizes``, the index behind the last one of its batch.

    Batches are neighbours whose sum is at most ``limit``, ``LARGEST_BATCH`` at most, and single ones that are larger.
    """
    ends: list[int] = []
    start = total = 0
    for index, nbytes in enumerate(sizes):
        if index > start and (total + nbytes > limit or index - start == thresholds.LARGEST_BATCH):
            ends += [index] * (index - start)
            start, total = index, 0
        total += nbytes
    return ends + [len(sizes)] * (len(sizes) - start)


class _Order(Generic[S]):
    """Stages in the order in which they are expected, in batches."""

    def __init__(self, stages: Sequence[S], batch_nbytes: int) -> None:
        self.stages = list(stages)
        #: The order that the next forward took when one had taken this.
        self.then: _Order[S] = self
        if batch_nbytes == 0:
            self._ends = list(range(1, len(self.stages) + 1))
            return
        # The first one is entered before anything can be prefetched.
        sizes = [stage.gathered_nbytes for stage in self.stages[1:]]
        self._ends = [1, *(1 + end for end in batch_ends(sizes, batch_nbytes))]

    def behind(self, position: int, ahead: int) -> list[list[S]]:
        """The ``ahead`` stages behind ``position``, at least one of the next batch, and what is gathered with them."""
        if not ahead:
            return []
        last = min(max(position + ahead, self._ends[position]), len(self.stages) - 1)
        batches = []
        position += 1
        while position <= last:
            end = self._ends[position]
            batches.append(self.stages[position:end])
            position = end
        return batches


class Schedule(Generic[S]):
    """Records the order of stages in forward, and answers what to prefetch.

    Args:
        forward_ahead: how many stages ahead of the computing one are prefetched in forward.
        backward_ahead: the same in backward.
        batch_nbytes: bytes up to which neighbouring stages are prefetched together; 0 for each by itself.
    """

    def __init__(self, forward_ahead: int, backward_ahead: int, batch_nbytes: int = 0) -> None:
        self._forward_ahead = forward_ahead
        self._backward_ahead = backward_ahead
        self.batch_nbytes = batch_nbytes
        # Those that finished forwards took, the last one first. One that is kept leads to one that is kept: what came
        # after it is more recent.
        self._routes: list[_Order[S]] = []
        self._backward_order: _Order[S] = _Order((), 0)
        self._backward_stale = False
        self._entered: list[S] = []
        # The one that the forward follows; None where it follows none.
        self._route: _Order[S] | None = None
        self._left: list[S] = []
        self._cursor = 0

    @property
    def ahead(self) -> int:
        """The most stages whose gathers are issued before they are needed."""
        return max(self._forward_ahead, self._backward_ahead)

    @property
    def order(self) -> tuple[S, ...]:
        """The stages in the order in which the last finished forward entered them."""
        return tuple(self._routes[0].stages) if self._routes else ()

    def begin_forward(self) -> None:
        """An outermost forward starts."""
        self._entered = []
        self._route = self._routes[0].then if self._routes else None

    def end_forward(self) -> None:
        """The outermost forward ended; the order that it recorded is one of those expected of the next."""
        taken = self._route
        if taken is None or taken.stages != self._entered:
            taken = next((route for route in self._routes if route.stages == self._entered), None)
        if taken is None:
            taken = _Order(self._entered, self.batch_nbytes)
        if self._routes:
            self._routes[0].then = taken
            if self._routes[0] is taken:
                return
            self._routes = [route for route in self._routes if route is not taken][: MOST_ROUTES - 1]
        self._routes.insert(0, taken)

    def enter(self, stage: S) -> list[list[S]]:
        """``stage`` starts its forward; returns the stages whose gather should be issued now, unless it was already.

        Those of one list are gathered together. Once a forward departs from all recorded orders, nothing more is
        prefetched in it: a wrong guess costs a gather and memory.
        """
        position = len(self._entered)
        self._entered.append(stage)
        route = self._route
        if route is None:
            return []
        if position >= len(route.stages) or route.stages[position] is not stage:
            route = self._route = self._beginning_as_entered()
            if route is None:
                return []
        return route.behind(position, self._forward_ahead)

    def _beginning_as_entered(self) -> _Order[S] | None:
        count = len(self._entered)
        return next((route for route in self._routes if route.stages[:count] == self._entered), None)

    @property
    def turning(self) -> S | None:
        """The inner stage whose backward is expected to follow its forward at once; None before the first forward.

        It is entered last, and either is a part of what surrounds the others, or the outermost stage, whose backward
        comes first, has nothing gathered.
        """
        return _turning(self._routes[0].stages) if self._routes else None

    def turns_at(self, stage: S) -> bool:
        """Whether ``stage``, whose forward ends, is what ``turning`` names for the order that this forward follows."""
        route = self._route
        return route is not None and len(self._entered) == len(route.stages) and _turning(route.stages) is stage

    def leave(self, stage: S) -> None:
        """``stage`` ended a forward that a backward will come back to."""
        self._left.append(stage)
        self._backward_stale = True
        self._cursor = len(self._left)

    def enter_backward(self, stage: S) -> list[list[S]]:
        """``stage`` starts its backward; returns the stages whose gather should be issued now, as ``enter`` does.

        Backward visits stages in the reverse of the order in which forwards left them. The cursor moves down only, so a
        backward over part of the graph skips what it does not visit.
        """
        position = self._cursor - 1
        while position >= 0 and self._left[position] is not stage:
            position -= 1
        if position < 0:
            return []
        self._cursor = position
        if self._backward_stale:
            self._backward_stale = False
            left = self._left[::-1]
            if self._backward_order.stages != left:
                self._backward_order = _Order(left, self.batch_nbytes)
        return self._backward_order.behind(len(self._left) - 1 - position, self._backward_ahead)

    def end_backward(self) -> None:
        """The backward ended; the next one starts from fresh forwards."""
        self._left.clear()
        self._backward_stale = True
        self._cursor = 0


def _turning(stages: Sequence[S]) -> S | None:
    if not stages:
        return None
    first, last = stages[0], stages[-1]
    return last if last.is_part or not first.gathered_nbytes else None


# In which order a backward gathers and reduces: fixed by the forward that it goes back through.
#
# Which stages a backward reaches differs between ranks, since each may use other outputs of what all of them ran. What it
# sends may not: a collective that one rank issues in another place meets another one there. So a forward records when it
# entered and left each stage, and a backward follows that record from its end. Wherever autograd arrives, it first does
# what the record says comes before, with nothing to add for the stages that it went past; what is left when the backward
# has ended is done then.
#
# Autograd runs what can run in the reverse order of creation. So on a rank that uses everything, the record's order is
# the one in which autograd arrives anyway, and nothing is done early: when it reaches a stage, all later ones have had
# every gradient that they will get.


T = TypeVar("T")


class Act(enum.Enum):
    """What a backward does with a stage."""

    GATHER = "gather"
    """Where the forward left it: gather its parameters."""
    FINISH = "finish"
    """Where the forward first entered it: release its parameters, and reduce its gradients."""
    RECOMPUTE = "recompute"
    """Where a checkpoint entered it: gather its parameters with those of all that this checkpoint computes again."""


@dataclass(eq=False, slots=True)
class Mark(Generic[T]):
    """One act at one stage. A stage keeps its marks for good, so that records are compared by identity, at C speed."""

    stage: T
    act: Act
    checkpoint: int = 0
    """The number of the checkpoint in that forward; 0 for the forward itself."""


@dataclass(eq=False, slots=True)
class Itinerary(Generic[T]):
    """When one outermost forward entered and left its stages, gradients on."""

    outermost: object
    """The stage whose forward it is."""
    marks: list[Mark[T]] = field(default_factory=list)
    """What it passed, in order."""
    walked: bool = False
    """Whether a backward that accumulates has followed it."""
    checkpoints: int = 0
    """How many checkpoints entered a stage."""
    reentrant: bool = False
    """Whether any of them was re-entrant."""


class Walk(Generic[T]):
    """How far one backward has come along the itineraries that it goes back through."""

    def __init__(self) -> None:
        self._itinerary: Itinerary[T] | None = None
        # Left behind by this backward, with nothing more to do.
        self._left: set[Itinerary[T]] = set()
        self._order: list[Mark[T]] = []
        self._index: dict[Mark[T], int] = {}
        self._recomputed: set[T] = set()
        self._done = 0
        # What ``_order`` was made of: steps repeat.
        self._ordered: list[Mark[T]] = []

    @property
    def begun(self) -> bool:
        """Whether this backward is on any itinerary."""
        return self._itinerary is not None

    def follows(self, itinerary: Itinerary[T]) -> bool:
        """Whether this backward is on ``itinerary``, or has left it behind."""
        return itinerary is self._itinerary or itinerary in self._left

    def begin(self, itinerary: Itinerary[T]) -> None:
        """Follow ``itinerary`` from its end. What was left of the one before must have been done."""
        if self._itinerary is not None:
            self._left.add(self._itinerary)
        self._itinerary = itinerary
        self._done = 0
        if self._ordered != itinerary.marks:
            self._ordered = list(itinerary.marks)
            self._order = backward_order(self._ordered)
            self._index = {mark: index for index, mark in enumerate(self._order)}
            self._recomputed = {mark.stage for mark in self._order if mark.act is Act.RECOMPUTE}

    def until(self, itinerary: Itinerary[T], mark: Mark[T]) -> Sequence[Mark[T]] | None:
        """What is to be done before ``mark``, which counts as done from now on; None if it did already."""
        index = self._index.get(mark, -1)
        if itinerary is not self._itinerary or index < self._done:
            return None
        before = self._order[self._done : index]
        self._done = index + 1
        return before

    def rest(self) -> Sequence[Mark[T]]:
        """What is left; it counts as done from now on."""
        if self._itinerary is None:
            return ()
        left = self._order[self._done :]
        self._done = len(self._order)
        return left

    def recomputes(self, stage: T) -> bool:
        """Whether a checkpoint entered ``stage``."""
        return stage in self._recomputed

    def end(self) -> None:
        """The backward has ended."""
        self._itinerary = None
        self._left.clear()


def backward_order(marks: Sequence[Mark[T]]) -> list[Mark[T]]:
    """``marks`` from the last to the first, each once.

    A stage that was entered several times is gathered for the last of them and finished after the first, where all of
    its gradients have come. What a checkpoint entered is gathered in the order of the forward, before any of it is
    finished.
    """
    kept: list[Mark[T]] = []
    entered: set[Mark[T]] = set()
    recomputed: dict[int, list[Mark[T]]] = {}
    for mark in marks:
        if mark.act is Act.FINISH:
            if mark in entered:
                continue
            entered.add(mark)
        elif mark.act is Act.RECOMPUTE:
            recomputed.setdefault(mark.checkpoint, []).append(mark)
        kept.append(mark)
    order: dict[Mark[T], None] = {}
    for mark in reversed(kept):
        if mark.act is Act.RECOMPUTE:
            order.update(dict.fromkeys(recomputed.pop(mark.checkpoint, ())))
        else:
            order.setdefault(mark)
    return list(order)
