"""In which order a backward gathers and reduces: fixed by the forward that it goes back through.

Which stages a backward reaches differs between ranks, since each may use other outputs of what all of them ran. What it
sends may not: a collective that one rank issues in another place meets another one there. So a forward records when it
entered and left each stage, and a backward follows that record from its end. Wherever autograd arrives, it first does
what the record says comes before, with nothing to add for the stages that it went past; what is left when the backward
has ended is done then.

Autograd runs what can run in the reverse order of creation. So on a rank that uses everything, the record's order is
the one in which autograd arrives anyway, and nothing is done early: when it reaches a stage, all later ones have had
every gradient that they will get.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S")


class Act(enum.Enum):
    """What a backward does with a stage."""

    GATHER = "gather"
    """Where the forward left it: gather its parameters."""
    FINISH = "finish"
    """Where the forward first entered it: release its parameters, and reduce its gradients."""
    RECOMPUTE = "recompute"
    """Where a checkpoint entered it: gather its parameters with those of all that this checkpoint computes again."""


@dataclass(eq=False, slots=True)
class Mark(Generic[S]):
    """One act at one stage. A stage keeps its marks for good, so that records are compared by identity, at C speed."""

    stage: S
    act: Act
    checkpoint: int = 0
    """The number of the checkpoint in that forward; 0 for the forward itself."""


@dataclass(eq=False, slots=True)
class Itinerary(Generic[S]):
    """When one outermost forward entered and left its stages, gradients on."""

    outermost: object
    """The stage whose forward it is."""
    marks: list[Mark[S]] = field(default_factory=list)
    """What it passed, in order."""
    walked: bool = False
    """Whether a backward that accumulates has followed it."""
    checkpoints: int = 0
    """How many checkpoints entered a stage."""
    reentrant: bool = False
    """Whether any of them was re-entrant."""


class Walk(Generic[S]):
    """How far one backward has come along the itineraries that it goes back through."""

    def __init__(self) -> None:
        self._itinerary: Itinerary[S] | None = None
        # Left behind by this backward, with nothing more to do.
        self._left: set[Itinerary[S]] = set()
        self._order: list[Mark[S]] = []
        self._index: dict[Mark[S], int] = {}
        self._recomputed: set[S] = set()
        self._done = 0
        # What ``_order`` was made of: steps repeat.
        self._ordered: list[Mark[S]] = []

    @property
    def begun(self) -> bool:
        """Whether this backward is on any itinerary."""
        return self._itinerary is not None

    def follows(self, itinerary: Itinerary[S]) -> bool:
        """Whether this backward is on ``itinerary``, or has left it behind."""
        return itinerary is self._itinerary or itinerary in self._left

    def begin(self, itinerary: Itinerary[S]) -> None:
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

    def until(self, itinerary: Itinerary[S], mark: Mark[S]) -> Sequence[Mark[S]] | None:
        """What is to be done before ``mark``, which counts as done from now on; None if it did already."""
        index = self._index.get(mark, -1)
        if itinerary is not self._itinerary or index < self._done:
            return None
        before = self._order[self._done : index]
        self._done = index + 1
        return before

    def rest(self) -> Sequence[Mark[S]]:
        """What is left; it counts as done from now on."""
        if self._itinerary is None:
            return ()
        left = self._order[self._done :]
        self._done = len(self._order)
        return left

    def recomputes(self, stage: S) -> bool:
        """Whether a checkpoint entered ``stage``."""
        return stage in self._recomputed

    def end(self) -> None:
        """The backward has ended."""
        self._itinerary = None
        self._left.clear()


def backward_order(marks: Sequence[Mark[S]]) -> list[Mark[S]]:
    """``marks`` from the last to the first, each once.

    A stage that was entered several times is gathered for the last of them and finished after the first, where all of
    its gradients have come. What a checkpoint entered is gathered in the order of the forward, before any of it is
    finished.
    """
    kept: list[Mark[S]] = []
    entered: set[Mark[S]] = set()
    recomputed: dict[int, list[Mark[S]]] = {}
    for mark in marks:
        if mark.act is Act.FINISH:
            if mark in entered:
                continue
            entered.add(mark)
        elif mark.act is Act.RECOMPUTE:
            recomputed.setdefault(mark.checkpoint, []).append(mark)
        kept.append(mark)
    order: dict[Mark[S], None] = {}
    for mark in reversed(kept):
        if mark.act is Act.RECOMPUTE:
            order.update(dict.fromkeys(recomputed.pop(mark.checkpoint, ())))
        else:
            order.setdefault(mark)
    return list(order)
