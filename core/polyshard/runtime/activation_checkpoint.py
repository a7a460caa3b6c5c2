"""Functions under ``torch.utils.checkpoint``: where a forward called them, and a backward calls them again.

[Note: recomputation]
A rank that uses no output of such a function never computes it again. Other ranks do, and need this rank's part of
their gathers and reductions. So a forward's record says which modules each function entered, and a backward gathers
them in that order before it goes through any of them, whichever outputs this rank used.

A re-entrant checkpoint differentiates each function by itself: its first call runs without gradients, and its modules
are reduced with it. So they have points of their own. The modules of other checkpoints have those of the forward.

A module that is entered finds the checkpoints around it among its callers. Torch makes an object for each call of a
checkpoint, which lives until no backward can come back to it; what is known of the call lives as long.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .. import _torch_private
from .backward import ForwardRecord


class Region:
    """Where in a forward a checkpoint called its function."""

    def __init__(self, reentrant: bool, outer: Region | None, recorded: bool) -> None:
        """``outer``: the region around it, while its function is called first.

        ``recorded``: whether a backward may come back to it.
        """
        self.reentrant = reentrant
        # No cycles, which would keep a forward's record until garbage is collected.
        self._outer = None if outer is None else weakref.ref(outer)
        self.recorded: bool = recorded or (outer is not None and outer.recorded)
        #: That of the forward; None before it enters a module.
        self.forward_record: ForwardRecord[Any] | None = None
        #: Whether its function runs several forwards. Backwards go through these one after the other, and compute the
        #: function again at once: no order that ranks have in common says where.
        self.several = False
        #: Its number in that forward, from 1 on.
        self.number = 0
        #: The regions inside it that enter modules, in the order of their calls.
        self.inner: list[Region] = []
        if outer is not None:
            outer.inner.append(self)

    @property
    def outer(self) -> Region | None:
        return None if self._outer is None else self._outer()

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
        outer = self.outer
        around = [] if outer is None else outer.enter(forward_record)
        return around if self.several else [self.number, *around]


class Checkpointed:
    """A call of a checkpoint, whose function runs in forward, and again in each backward."""

    def __init__(self, region: Region) -> None:
        self.region = region
        #: The module states that the run of its function has entered.
        self.entered: set[object] = set()
        # The number of the backward that the function runs in.
        self._backward = _torch_private.NO_BACKWARD
        self._inner = 0

    def run_again(self, backward: int) -> None:
        """Note that its function runs again, in the backward of that number: once in each."""
        if backward != self._backward:
            self._backward, self._inner = backward, 0
            self.entered.clear()

    def next_inner(self, reentrant: bool) -> Region:
        """The region of the next checkpoint inside it, which is computed again with it."""
        index, self._inner = self._inner, self._inner + 1
        inner = self.region.inner
        if index < len(inner) and inner[index].reentrant is reentrant:
            return inner[index]
        # The forward called another one.
        return Region(reentrant, None, recorded=False)


# By torch's object for the call.
_calls: weakref.WeakKeyDictionary[object, Checkpointed] = weakref.WeakKeyDictionary()


class Running(NamedTuple):
    """The checkpoints whose functions a thread runs."""

    call: Checkpointed
    """The innermost call."""
    again: Checkpointed | None
    """The innermost one that a backward runs again; None in a forward."""


def running(*, records: bool = False) -> Running | None:
    """The checkpoints whose functions this thread runs; None for none that a backward comes back to.

    ``records``: whether the outermost forward began with gradients on. It stands for the mode in which a re-entrant
    checkpoint was called none of whose inputs needs a gradient: another rank's may. Where that was called under
    ``no_grad``, backward gathers its modules for nothing.
    """
    if not _torch_private.may_be_checkpointed():
        return None
    found: Running | None = None
    for each in reversed(_torch_private.calls_of_checkpoints()):
        call, again = _calls.get(each.key), None if found is None else found.again
        if call is None:
            if found is not None and again is not None:
                region = found.call.next_inner(each.reentrant)
            else:
                recorded = records if each.recorded is None else each.recorded
                region = Region(each.reentrant, None if found is None else found.call.region, recorded)
            call = _calls[each.key] = Checkpointed(region)
        if each.again:
            call.run_again(_torch_private.backward_number())
            again = call
        found = Running(call, again)
    return found


def may_have_backward() -> bool:
    """Whether a backward may come back to what this thread computes. The same on all ranks, whatever their outputs."""
    if torch.is_grad_enabled():
        return True
    here = running()
    return here is not None and here.call.region.recorded
