"""Functions under ``torch.utils.checkpoint``: where a forward called them, and that a backward calls them again.

[Note: recomputation]
A rank that uses nothing of what such a function returned never computes it again, but other ranks do, and need its part
of what they gather and reduce then. So the forward record of a forward says which module states each function entered. A backward
gathers them in that order before it goes back through any of them, whichever outputs this rank used.

A re-entrant checkpoint differentiates each function by itself: its first call runs without gradients, and the module states in
it are finished with it. So what it entered has marks of its own. Those of a checkpoint that is not re-entrant are on
the forward's way as if there were none.
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
        #: The one around it, while its function is called first.
        self.outer = outer
        #: Whether a backward may come back to it.
        self.recorded: bool = torch.is_grad_enabled() or (outer is not None and outer.recorded)
        #: Of the forward; None as long as no module state was entered.
        self.forward_record: ForwardRecord[Any] | None = None
        #: Whether its function runs several forwards. They are gone back through one after the other, and it is
        #: computed again at once: nothing that ranks have in common says where.
        self.several = False
        #: Which one it is in that forward, from 1 on.
        self.number = 0
        #: Those inside it, in the order of their calls.
        self.inner: list[Region] = []
        #: Whether its function has been called.
        self.complete = False
        if outer is not None:
            outer.inner.append(self)

    @property
    def differentiated(self) -> Region | None:
        """The innermost re-entrant one around a module state in it; None where there is none."""
        region: Region | None = self
        while region is not None and not region.reentrant:
            region = region.outer
        return region

    def enter(self, forward_record: ForwardRecord[Any]) -> list[int]:
        """A module state is entered in it; the numbers of all regions around that module state, from the innermost on."""
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


_running = _Running()


class Checkpointed:
    """A function that a checkpoint calls in forward, and again in each backward."""

    def __init__(self, function: Callable[..., Any], reentrant: bool) -> None:
        self._function = function
        around = _running.call
        if around is not None and around.region.complete:
            # Called anew, as what surrounds it is.
            self.region: Region = around.next_inner(reentrant)
        else:
            self.region = Region(reentrant, None if around is None else around.region)
        self._called = False
        self._inner = 0
        #: What a backward computes again, this or what surrounds it; None in a forward.
        self.again: Checkpointed | None = None
        #: The module states that it has entered so far.
        self.entered: set[object] = set()

    def next_inner(self, reentrant: bool) -> Region:
        """That of the next checkpoint inside it, which is computed again with it."""
        index, self._inner = self._inner, self._inner + 1
        inner = self.region.inner
        if index < len(inner) and inner[index].reentrant is reentrant:
            return inner[index]
        # Not what the forward called.
        unknown = Region(reentrant, None)
        unknown.recorded, unknown.complete = False, True
        return unknown

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        around = _running.call
        self._inner = 0
        self.entered.clear()
        if self._called:
            self.again = self
        else:
            self._called = True
            self.again = None if around is None else around.again
        _running.call = self
        try:
            return self._function(*args, **kwargs)
        finally:
            _running.call = around
            # No cycles, which would keep what the function refers to until garbage is collected.
            self.again, self.region.outer = None, None
            self.region.complete = True


def running() -> Checkpointed | None:
    """The innermost function under a checkpoint that this thread runs; None for none."""
    return _running.call
