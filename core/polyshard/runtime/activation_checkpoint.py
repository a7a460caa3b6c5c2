"""Functions under ``torch.utils.checkpoint``: where a forward called them, and a backward calls them again.

[Note: recomputation]
A rank that uses no output of such a function never computes it again. Other ranks do, and need this rank's part of
their gathers and reductions. So a forward's record says which modules each function entered, and a backward gathers
them in that order before it goes through any of them, whichever outputs this rank used.

A re-entrant checkpoint differentiates each function by itself: its first call runs without gradients, and its modules
are reduced with it. So they have points of their own. The modules of other checkpoints have those of the forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .order import ForwardRecord


class Region:
    """Where in a forward a checkpoint called its function."""

    def __init__(self, reentrant: bool, outer: Region | None) -> None:
        self.reentrant = reentrant
        #: The region around it, while its function is called first.
        self.outer = outer
        #: Whether a backward may come back to it.
        self.recorded: bool = torch.is_grad_enabled() or (outer is not None and outer.recorded)
        #: That of the forward; None before it enters a module.
        self.forward_record: ForwardRecord[Any] | None = None
        #: Whether its function runs several forwards. Backwards go through these one after the other, and compute the
        #: function again at once: no order that ranks have in common says where.
        self.several = False
        #: Its number in that forward, from 1 on.
        self.number = 0
        #: The regions inside it, in the order of their calls.
        self.inner: list[Region] = []
        #: Whether its function has been called.
        self.complete = False
        if outer is not None:
            outer.inner.append(self)

    @property
    def differentiated(self) -> Region | None:
        """The innermost re-entrant region around a module in it; None where there is none."""
        region: Region | None = self
        while region is not None and not region.reentrant:
            region = region.outer
        return region

    def enter(self, forward_record: ForwardRecord[Any]) -> list[int]:
        """Note that a module is entered in it; returns the numbers of all regions around that, the innermost first."""
        if self.forward_record is None:
            self.forward_record = forward_record
            forward_record.checkpoints += 1
            self.number = forward_record.checkpoints
            forward_record.reentrant |= self.reentrant
        elif self.forward_record is not forward_record:
            self.several = True
        around = [] if self.outer is None else self.outer.enter(forward_record)
        return around if self.several else [self.number, *around]


class _Running(threading.local):
    call: Checkpointed | None = None


#: Of each thread: the innermost checkpointed call that it runs; None for none.
running = _Running()


class Checkpointed:
    """A function that a checkpoint calls in forward, and again in each backward."""

    def __init__(self, function: Callable[..., Any], reentrant: bool) -> None:
        self._function = function
        around = running.call
        if around is not None and around.region.complete:
            # Called again with the function around it.
            self.region: Region = around.next_inner(reentrant)
        else:
            self.region = Region(reentrant, None if around is None else around.region)
        self._called = False
        self._inner = 0
        #: The call that a backward runs again, this one or one around it; None in a forward.
        self.again: Checkpointed | None = None
        #: The module states that it has entered.
        self.entered: set[object] = set()

    def next_inner(self, reentrant: bool) -> Region:
        """The region of the next checkpoint inside it, which is computed again with it."""
        index, self._inner = self._inner, self._inner + 1
        inner = self.region.inner
        if index < len(inner) and inner[index].reentrant is reentrant:
            return inner[index]
        # The forward called another one.
        unknown = Region(reentrant, None)
        unknown.recorded, unknown.complete = False, True
        return unknown

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        around = running.call
        self._inner = 0
        self.entered.clear()
        if self._called:
            self.again = self
        else:
            self._called = True
            self.again = None if around is None else around.again
        running.call = self
        try:
            return self._function(*args, **kwargs)
        finally:
            running.call = around
            # No cycles, which would keep what the function refers to until garbage is collected.
            self.again, self.region.outer = None, None
            self.region.complete = True


def may_have_backward() -> bool:
    """Whether a backward may come back to what this thread computes. The same on all ranks, whatever their outputs."""
    return torch.is_grad_enabled() or (running.call is not None and running.call.region.recorded)
