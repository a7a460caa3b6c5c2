"""In which order module states ran, and which come next.

Collectives are issued in an order that follows from recorded order alone, never from timing, so that every rank that
runs the same program prefetches alike.

[Note: batches]
Small module states that follow each other are gathered together, since a gather of few bytes takes as long as one of several
times as many. The recorded order is divided into batches once, by the module states' sizes alone, and whoever asks for a module state
gets the rest of its batch with it. So a batch is issued when the first of its module states is, and all ranks divide alike. It
is asked for as soon as the batch before it is entered, not with that one's last module state: it then has as much compute to
travel beside as it has bytes, where links are slow.

Compute waits for the whole of a batch before it enters its first module state, and all of a batch takes memory at once. So
one has no more module states than a number from which on the host gains little by fewer launches.

[Note: routes]
Not every forward takes the same way: an encoder and a decoder that are called in turns, a mixture whose blocks change
places, an evaluation that skips one. A few recorded orders are kept, the last ones that were taken. A forward is
expected to take the one that last came after the order before it, so that orders that alternate are foreseen from their
first module state. Where it departs, another order that begins with what was entered so far is followed from there on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..planning import thresholds


class Gathered(Protocol):
    """What a execution order needs to know of a module state."""

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of its gather buffers."""

    @property
    def is_split(self) -> bool:
        """Whether it was split off the module state around it."""


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
    """Module states in the order in which they are expected, in batches."""

    def __init__(self, module_states: Sequence[S], batch_nbytes: int) -> None:
        self.module_states = list(module_states)
        #: The order that the next forward took when one had taken this.
        self.then: _Order[S] = self
        if batch_nbytes == 0:
            self._ends = list(range(1, len(self.module_states) + 1))
            return
        # The first one is entered before anything can be prefetched.
        sizes = [module_state.gathered_nbytes for module_state in self.module_states[1:]]
        self._ends = [1, *(1 + end for end in batch_ends(sizes, batch_nbytes))]

    def behind(self, position: int, ahead: int) -> list[list[S]]:
        """The ``ahead`` module states behind ``position``, at least one of the next batch, and what is gathered with them."""
        if not ahead:
            return []
        last = min(max(position + ahead, self._ends[position]), len(self.module_states) - 1)
        batches = []
        position += 1
        while position <= last:
            end = self._ends[position]
            batches.append(self.module_states[position:end])
            position = end
        return batches


class ExecutionOrder(Generic[S]):
    """Records the order of module states in forward, and answers what to prefetch.

    Args:
        forward_ahead: how many module states ahead of the computing one are prefetched in forward.
        backward_ahead: the same in backward.
        batch_nbytes: bytes up to which neighbouring module states are prefetched together; 0 for each by itself.
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
        """The most module states whose gathers are issued before they are needed."""
        return max(self._forward_ahead, self._backward_ahead)

    @property
    def order(self) -> tuple[S, ...]:
        """The module states in the order in which the last finished forward entered them."""
        return tuple(self._routes[0].module_states) if self._routes else ()

    def begin_forward(self) -> None:
        """An outermost forward starts."""
        self._entered = []
        self._route = self._routes[0].then if self._routes else None

    def end_forward(self) -> None:
        """The outermost forward ended; the order that it recorded is one of those expected of the next."""
        taken = self._route
        if taken is None or taken.module_states != self._entered:
            taken = next((route for route in self._routes if route.module_states == self._entered), None)
        if taken is None:
            taken = _Order(self._entered, self.batch_nbytes)
        if self._routes:
            self._routes[0].then = taken
            if self._routes[0] is taken:
                return
            self._routes = [route for route in self._routes if route is not taken][: MOST_ROUTES - 1]
        self._routes.insert(0, taken)

    def enter(self, module_state: S) -> list[list[S]]:
        """``module_state`` starts its forward; returns the module states whose gather should be issued now, unless it was already.

        Those of one list are gathered together. Once a forward departs from all recorded orders, nothing more is
        prefetched in it: a wrong guess costs a gather and memory.
        """
        position = len(self._entered)
        self._entered.append(module_state)
        route = self._route
        if route is None:
            return []
        if position >= len(route.module_states) or route.module_states[position] is not module_state:
            route = self._route = self._beginning_as_entered()
            if route is None:
                return []
        return route.behind(position, self._forward_ahead)

    def _beginning_as_entered(self) -> _Order[S] | None:
        count = len(self._entered)
        return next((route for route in self._routes if route.module_states[:count] == self._entered), None)

    @property
    def turning(self) -> S | None:
        """The inner module state whose backward is expected to follow its forward at once; None before the first forward.

        It is entered last, and either is a part of what surrounds the others, or the outermost module state, whose backward
        comes first, has nothing gathered.
        """
        return _turning(self._routes[0].module_states) if self._routes else None

    def turns_at(self, module_state: S) -> bool:
        """Whether ``module_state``, whose forward ends, is what ``turning`` names for the order that this forward follows."""
        route = self._route
        return (
            route is not None
            and len(self._entered) == len(route.module_states)
            and _turning(route.module_states) is module_state
        )

    def leave(self, module_state: S) -> None:
        """``module_state`` ended a forward that a backward will come back to."""
        self._left.append(module_state)
        self._backward_stale = True
        self._cursor = len(self._left)

    def enter_backward(self, module_state: S) -> list[list[S]]:
        """``module_state`` starts its backward; returns the module states whose gather should be issued now, as ``enter`` does.

        Backward visits module states in the reverse of the order in which forwards left them. The cursor moves down only, so a
        backward over part of the graph skips what it does not visit.
        """
        position = self._cursor - 1
        while position >= 0 and self._left[position] is not module_state:
            position -= 1
        if position < 0:
            return []
        self._cursor = position
        if self._backward_stale:
            self._backward_stale = False
            left = self._left[::-1]
            if self._backward_order.module_states != left:
                self._backward_order = _Order(left, self.batch_nbytes)
        return self._backward_order.behind(len(self._left) - 1 - position, self._backward_ahead)

    def end_backward(self) -> None:
        """The backward ended; the next one starts from fresh forwards."""
        self._left.clear()
        self._backward_stale = True
        self._cursor = 0


def _turning(module_states: Sequence[S]) -> S | None:
    if not module_states:
        return None
    first, last = module_states[0], module_states[-1]
    return last if last.is_split or not first.gathered_nbytes else None


# In which order a backward gathers and reduces: fixed by the forward that it goes back through.
#
# Which module states a backward reaches differs between ranks, since each may use other outputs of what all of them ran. What it
# sends may not: a collective that one rank issues in another place meets another one there. So a forward records when it
# entered and left each module state, and a backward follows that record from its end. Wherever autograd arrives, it first does
# what the record says comes before, with nothing to add for the module states that it went past; what is left when the backward
# has ended is done then.
#
# Autograd runs what can run in the reverse order of creation. So on a rank that uses everything, the record's order is
# the one in which autograd arrives anyway, and nothing is done early: when it reaches a module state, all later ones have had
# every gradient that they will get.


T = TypeVar("T")


class BackwardAction(enum.Enum):
    """What a backward does with a module state."""

    PRE_BACKWARD = "pre-backward"
    """Where the forward left it: gather its parameters."""
    POST_BACKWARD = "post-backward"
    """Where the forward first entered it: release its parameters, and reduce its gradients."""
    RECOMPUTE = "recompute"
    """Where a checkpoint entered it: gather its parameters with those of all that this checkpoint computes again."""


@dataclass(eq=False, slots=True)
class Point(Generic[T]):
    """One act at one module state. A module state keeps its marks for good, so that records are compared by identity, at C speed."""

    module_state: T
    act: BackwardAction
    checkpoint: int = 0
    """The number of the checkpoint in that forward; 0 for the forward itself."""


@dataclass(eq=False, slots=True)
class ForwardRecord(Generic[T]):
    """When one outermost forward entered and left its module states, gradients on."""

    outermost: object
    """The module state whose forward it is."""
    points: list[Point[T]] = field(default_factory=list)
    """What it passed, in order."""
    followed: bool = False
    """Whether a backward that accumulates has followed it."""
    checkpoints: int = 0
    """How many checkpoints entered a module state."""
    reentrant: bool = False
    """Whether any of them was re-entrant."""


class BackwardOrder(Generic[T]):
    """How far one backward has come along the forward records that it goes back through."""

    def __init__(self) -> None:
        self._itinerary: ForwardRecord[T] | None = None
        # Left behind by this backward, with nothing more to do.
        self._left: set[ForwardRecord[T]] = set()
        self._order: list[Point[T]] = []
        self._index: dict[Point[T], int] = {}
        self._recomputed: set[T] = set()
        self._done = 0
        # What ``_order`` was made of: steps repeat.
        self._ordered: list[Point[T]] = []

    @property
    def begun(self) -> bool:
        """Whether this backward is on any forward record."""
        return self._itinerary is not None

    def follows(self, forward_record: ForwardRecord[T]) -> bool:
        """Whether this backward is on ``forward_record``, or has left it behind."""
        return forward_record is self._itinerary or forward_record in self._left

    def begin(self, forward_record: ForwardRecord[T]) -> None:
        """Follow ``forward_record`` from its end. What was left of the one before must have been done."""
        if self._itinerary is not None:
            self._left.add(self._itinerary)
        self._itinerary = forward_record
        self._done = 0
        if self._ordered != forward_record.points:
            self._ordered = list(forward_record.points)
            self._order = backward_order(self._ordered)
            self._index = {point: index for index, point in enumerate(self._order)}
            self._recomputed = {point.module_state for point in self._order if point.act is BackwardAction.RECOMPUTE}

    def until(self, forward_record: ForwardRecord[T], point: Point[T]) -> Sequence[Point[T]] | None:
        """What is to be done before ``point``, which counts as done from now on; None if it did already."""
        index = self._index.get(point, -1)
        if forward_record is not self._itinerary or index < self._done:
            return None
        before = self._order[self._done : index]
        self._done = index + 1
        return before

    def rest(self) -> Sequence[Point[T]]:
        """What is left; it counts as done from now on."""
        if self._itinerary is None:
            return ()
        left = self._order[self._done :]
        self._done = len(self._order)
        return left

    def recomputes(self, module_state: T) -> bool:
        """Whether a checkpoint entered ``module_state``."""
        return module_state in self._recomputed

    def end(self) -> None:
        """The backward has ended."""
        self._itinerary = None
        self._left.clear()


def backward_order(points: Sequence[Point[T]]) -> list[Point[T]]:
    """``points`` from the last to the first, each once.

    A module state that was entered several times is gathered for the last of them and finished after the first, where all of
    its gradients have come. What a checkpoint entered is gathered in the order of the forward, before any of it is
    finished.
    """
    kept: list[Point[T]] = []
    entered: set[Point[T]] = set()
    recomputed: dict[int, list[Point[T]]] = {}
    for point in points:
        if point.act is BackwardAction.POST_BACKWARD:
            if point in entered:
                continue
            entered.add(point)
        elif point.act is BackwardAction.RECOMPUTE:
            recomputed.setdefault(point.checkpoint, []).append(point)
        kept.append(point)
    order: dict[Point[T], None] = {}
    for point in reversed(kept):
        if point.act is BackwardAction.RECOMPUTE:
            order.update(dict.fromkeys(recomputed.pop(point.checkpoint, ())))
        else:
            order.setdefault(point)
    return list(order)
