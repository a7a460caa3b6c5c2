"""The backward that runs: its gathers and reductions, in one order on all ranks.

[Note: backward order]
Which modules a backward reaches differs between ranks, since each may use other outputs of one forward. Its collectives
may not: one that a rank issues in another place meets another collective there. So a forward records where it entered
and left each module, and a backward follows that record from its end. Wherever autograd arrives, the backward first
does everything that the record has before that point; what is left is done when autograd has ended. Autograd runs ready
nodes in the reverse order of creation, so a rank that uses every output arrives in the record's order anyway, and
nothing is done early.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from .. import _torch_private
from .order import ExecutionOrder, Gathered, Order


class Followed(Gathered, Protocol):
    """A module, as a backward goes through it."""

    reads_in_backward: bool
    joins_reduction: bool
    recomputed: bool

    def unshard(self) -> None:
        """Gather for this rank, and for others."""

    def gather_for_others(self, batches: Sequence[Sequence[Any]]) -> None:
        """Gather with ranks whose backward comes through here, and ``batches``, which come next."""

    def late_post_backward(self) -> None:
        """Reduce with ranks whose backward came through here."""


class Trained(Protocol):
    """A unit, as a backward sees it."""

    trainable: bool


T = TypeVar("T", bound=Followed)


class BackwardAction(enum.Enum):
    """What a backward does at a point of its order."""

    PRE_BACKWARD = "pre-backward"
    """Where the forward left the module: gather its parameters."""
    POST_BACKWARD = "post-backward"
    """Where the forward first entered the module: release its parameters, and reduce its gradients."""
    RECOMPUTE = "recompute"
    """Where a checkpoint entered the module: gather all that the checkpoint computes again."""


@dataclass(eq=False, slots=True)
class Point(Generic[T]):
    """One action at one module. A module keeps its points for good: records are compared by identity, at C speed."""

    module_state: T
    action: BackwardAction
    checkpoint: int = 0
    """The number of the checkpoint in that forward; 0 for the forward itself."""


@dataclass(eq=False, slots=True)
class ForwardRecord(Generic[T]):
    """Where one outermost forward entered and left modules with gradients on."""

    outermost: object
    """The module state whose forward it is."""
    module: object = None
    """The module that was called: one of several where that module state groups them."""
    records: bool = False
    """Whether it began with gradients on."""
    points: list[Point[T]] = field(default_factory=list)
    """In the order of the forward."""
    followed: bool = False
    """Whether a backward that accumulates has followed it."""
    checkpoints: int = 0
    """How many checkpoints entered a module."""
    reentrant: bool = False
    """Whether any of them was re-entrant."""


class BackwardPass(Generic[T]):
    """The backward that runs, along the records of the forwards that it goes through, and how far it has come."""

    def __init__(self, units: Sequence[Trained], turn: Callable[[], None], execution_order: ExecutionOrder[T]) -> None:
        """``units``: all of the model's. ``turn``: called where it leaves one forward for an earlier one.

        ``execution_order``: how far ahead backwards gather, and in which batches.
        """
        #: Whether it adds to gradients: ``autograd.grad`` does not.
        self.accumulates = False
        self._units, self._turn, self._execution_order = units, turn, execution_order
        # The record that it follows; None before the first.
        self._record: ForwardRecord[T] | None = None
        # Records that it is done with.
        self._left: set[ForwardRecord[T]] = set()
        self._order: list[Point[T]] = []
        self._index: dict[Point[T], int] = {}
        # By module state: the batches to gather where the backward comes to it.
        self._behind: dict[T, list[list[T]]] = {}
        self._recomputed: set[T] = set()
        self._done = 0
        # The points that ``_order`` was made of: steps repeat.
        self._ordered: list[Point[T]] = []
        # Since the last backward, the last record of each inner module that was called by itself with gradients on.
        self._apart: dict[object, ForwardRecord[T]] = {}
        # Whether one that accumulates has gone through these.
        self._followed = False

    @property
    def reduces_once(self) -> bool:
        """Whether no inner module was called by itself before it, whose units it may reduce more than once."""
        return self._followed or not self._apart

    def keep_apart(self, forward_record: ForwardRecord[T]) -> None:
        """An inner module was called by itself, which the next backward may come to in another place on each rank."""
        if forward_record.points:
            if self._followed:
                self._apart.clear()
                self._followed = False
            # Behind those that came before.
            self._apart.pop(forward_record.module, None)
            self._apart[forward_record.module] = forward_record

    def accumulate_reentrantly(self) -> None:
        """Note that a re-entrant checkpoint is on the way, whose parameters are in a graph of its own."""
        if not self.accumulates and _torch_private.may_recompute_reentrantly():
            self.accumulates = any(unit.trainable for unit in self._units)

    def arrive(self, forward_record: ForwardRecord[T], point: Point[T]) -> bool:
        """Do everything that comes before ``point``, whichever outputs this rank used.

        So every rank gathers and reduces in one order. Where the backward leaves one forward for an earlier one, it
        goes through the forwards in between too, whose outputs this rank did not use.

        Returns:
            Whether ``point`` is new: False where the backward did it already, or is on another forward.
        """
        if forward_record is not self._record and forward_record not in self._left:
            self._follow(self._rest())
            if self._record is not None:
                self._turn()
            for between in self._between(forward_record):
                self._go_through(between)
            self.begin(forward_record)
            if forward_record.reentrant:
                self.accumulate_reentrantly()
            forward_record.followed |= self.accumulates
        index = self._index.get(point, -1)
        if forward_record is not self._record or index < self._done:
            return False
        before = self._order[self._done : index]
        self._done = index + 1
        if before:
            self._follow(before)
        if point.action is BackwardAction.POST_BACKWARD:
            point.module_state.joins_reduction = self.accumulates
        return True

    def arrive_at(self, forward_record: ForwardRecord[T], point: Point[T]) -> Sequence[Sequence[T]] | None:
        """As ``arrive``; returns the batches to gather next, None where ``point`` is not new."""
        return self.batches_behind(point.module_state) if self.arrive(forward_record, point) else None

    def batches_behind(self, module_state: T) -> Sequence[Sequence[T]]:
        """The batches to gather where the backward comes to ``module_state``, unless they are already."""
        hints = self._execution_order.backward_hints
        return hints[module_state] if module_state in hints else self._behind.get(module_state, ())

    def begin(self, forward_record: ForwardRecord[T]) -> None:
        """Follow ``forward_record`` from its end, behind all of the record before."""
        if self._record is not None:
            self._left.add(self._record)
        self._record = forward_record
        self._done = 0
        if self._ordered != forward_record.points:
            self._ordered = list(forward_record.points)
            self._order = _order_of(self._ordered)
            self._index = {point: index for index, point in enumerate(self._order)}
            self._recomputed = {point.module_state for point in self._order if point.action is BackwardAction.RECOMPUTE}
            gathered = [
                point.module_state
                for point in self._order
                if point.action is BackwardAction.PRE_BACKWARD and point.module_state.reads_in_backward
            ]
            order = Order(gathered, self._execution_order.backward_ahead, self._execution_order.batch_nbytes)
            self._behind = dict(zip(gathered, order.behind, strict=True))

    def end(self) -> None:
        """Do all that is left, and end."""
        self._follow(self._rest())
        if self.accumulates:
            for forward_record in [each for each in reversed(self._apart.values()) if not each.followed]:
                self._go_through(forward_record)
            self._followed = True
        self.give_up()

    def give_up(self) -> None:
        """End, and leave what is left."""
        self._record = None
        self._left.clear()

    def _rest(self) -> Sequence[Point[T]]:
        if self._record is None:
            return ()
        left = self._order[self._done :]
        self._done = len(self._order)
        return left

    def _between(self, forward_record: ForwardRecord[T]) -> list[ForwardRecord[T]]:
        """Forwards of inner modules that were called after ``forward_record``, and not followed yet; latest first."""
        found: list[ForwardRecord[T]] = []
        if self.accumulates and forward_record in self._apart.values():
            for other in reversed(self._apart.values()):
                if other is forward_record:
                    break
                if not other.followed:
                    found.append(other)
        return found

    def _go_through(self, forward_record: ForwardRecord[T]) -> None:
        forward_record.followed = True
        self.begin(forward_record)
        self._follow(self._rest())

    def _follow(self, points: Sequence[Point[T]]) -> None:
        """Take part in the gathers and reductions at ``points``, which other ranks' backwards may come through."""
        for point in points:
            module_state = point.module_state
            if point.action is BackwardAction.POST_BACKWARD:
                module_state.joins_reduction = self.accumulates
                module_state.recomputed = module_state in self._recomputed
                module_state.late_post_backward()
            elif point.action is BackwardAction.RECOMPUTE:
                module_state.unshard()
            else:
                module_state.gather_for_others(self.batches_behind(module_state))


def _order_of(points: Sequence[Point[T]]) -> list[Point[T]]:
    """``points`` from the last to the first, each once.

    A module that was entered several times is gathered for the last entry, and reduced at the first, where all of its
    gradients are there. Modules that a checkpoint entered are gathered in the order of the forward, before any of them
    is reduced.
    """
    kept: list[Point[T]] = []
    entered: set[Point[T]] = set()
    recomputed: dict[int, list[Point[T]]] = {}
    for point in points:
        if point.action is BackwardAction.POST_BACKWARD:
            if point in entered:
                continue
            entered.add(point)
        elif point.action is BackwardAction.RECOMPUTE:
            recomputed.setdefault(point.checkpoint, []).append(point)
        kept.append(point)
    order: dict[Point[T], None] = {}
    for point in reversed(kept):
        if point.action is BackwardAction.RECOMPUTE:
            order.update(dict.fromkeys(recomputed.pop(point.checkpoint, ())))
        else:
            order.setdefault(point)
    return list(order)
