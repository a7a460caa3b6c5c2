"""Forwards of a stage inside a backward: what activation checkpointing runs again.

They are on no itinerary, for no forward that other ranks know of called them. So what tells that their gradients have
come is that the inputs of each have theirs, counted here.
"""

from __future__ import annotations

from weakref import WeakSet


class Recomputation:
    """One of them; alive as long as its graph."""

    __slots__ = ("__weakref__",)


class Recomputations:
    """Those of one stage whose own backward is still to come."""

    def __init__(self) -> None:
        # Weak: a graph that was dropped takes its own along.
        self._outstanding: WeakSet[Recomputation] = WeakSet()

    def begin(self) -> Recomputation:
        """One more, whose graph is to hold what is returned."""
        call = Recomputation()
        self._outstanding.add(call)
        return call

    def end(self, call: Recomputation) -> bool:
        """The inputs of ``call`` have their gradients; returns whether those of all have."""
        self._outstanding.discard(call)
        return not self._outstanding

    def forget(self) -> None:
        """Wait for none of them."""
        self._outstanding.clear()
