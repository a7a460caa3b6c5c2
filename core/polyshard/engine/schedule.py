"""In which order stages ran, and which come next.

Collectives are issued in an order that follows from recorded order alone, never from timing, so that every rank that
runs the same program prefetches alike.
"""

from __future__ import annotations

from typing import Generic, TypeVar

S = TypeVar("S")


class Schedule(Generic[S]):
    """Records the order of stages in forward, and answers what to prefetch."""

    def __init__(self, forward_ahead: int, backward_ahead: int) -> None:
        self._forward_ahead = forward_ahead
        self._backward_ahead = backward_ahead
        self._expected: list[S] = []
        self._entered: list[S] = []
        self._follows = False
        self._left: list[S] = []
        self._cursor = 0

    @property
    def ahead(self) -> int:
        """The most stages whose gathers are issued before they are needed."""
        return max(self._forward_ahead, self._backward_ahead)

    @property
    def order(self) -> tuple[S, ...]:
        """The stages in the order in which the last finished forward entered them."""
        return tuple(self._expected)

    def begin_forward(self) -> None:
        """An outermost forward starts."""
        self._entered = []
        self._follows = bool(self._expected)

    def end_forward(self) -> None:
        """The outermost forward ended; what it recorded is expected of the next."""
        self._expected = self._entered

    def enter(self, stage: S) -> list[S]:
        """``stage`` starts its forward; returns the stages whose gather should be issued now.

        Once a forward departs from the recorded order, nothing more is prefetched in it: a wrong guess costs a gather
        and memory.
        """
        position = len(self._entered)
        self._entered.append(stage)
        if not self._follows:
            return []
        if position >= len(self._expected) or self._expected[position] is not stage:
            self._follows = False
            return []
        return self._expected[position + 1 : position + 1 + self._forward_ahead]

    def leave(self, stage: S) -> None:
        """``stage`` ended a forward that a backward will come back to."""
        self._left.append(stage)
        self._cursor = len(self._left)

    def enter_backward(self, stage: S) -> list[S]:
        """``stage`` starts its backward; returns the stages whose gather should be issued now.

        Backward visits stages in the reverse of the order in which forwards left them. The cursor moves down only, so a
        backward over part of the graph skips what it does not visit.
        """
        position = self._cursor - 1
        while position >= 0 and self._left[position] is not stage:
            position -= 1
        if position < 0:
            return []
        self._cursor = position
        low = max(0, position - self._backward_ahead)
        return self._left[low:position][::-1]

    def end_backward(self) -> None:
        """The backward ended; the next one starts from fresh forwards."""
        self._left.clear()
        self._cursor = 0
