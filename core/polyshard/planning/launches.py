"""In which launches units are gathered and reduced: by their order and sizes alone, so that all ranks plan alike.

[Note: one plan]
Ranks of one model may share several groups: beside tensor or expert parallelism, each unit has groups of its own. A
communication waits for all ranks of its group. If two ranks came to two of them in different orders, each would wait in
one for the other, for good. So every rank issues the launches of all units in one order. That follows from the order of
units, which forwards record, and from ``Unit.launch_numel``, which is the same on all ranks. Bytes of this rank are
not: tensor parallelism may cut unevenly, and ranks may hold different numbers of experts. They count for memory alone.

[Note: batches]
Small neighbours are gathered together: a gather of few bytes takes as long as one of several times as many. The
recorded order is divided into batches once. A batch is issued as soon as the batch before it is entered, and not with
that one's last module: it then has as much compute to travel beside as it has bytes, where links are slow. Compute
waits for a whole batch before it enters its first module, and a whole batch takes memory at once. So the number of
modules in one is limited: beyond it fewer launches save the host little. Units of several groups take one launch for
each group, in the order in which the groups come up.

[Note: buckets]
A reduction of few bytes takes as long as one of several times as many, and so does the copy that brings few gradients
together, on the device and on the host. So the gradients of small units wait, in the order in which backward computes
them, until the bucket is full, until a unit of the same groups that is no small one is reduced, or until backward ends.
Then, on the stream that reduces, one copy brings all of them into their units' inputs, another one writes the inputs
next to each other, rank by rank, and one communication reduces them. Gradients of parameters that each rank holds an
equal part of need the second copy alone. The result is cut into the units' gradient shards.

Units of medium size have enough bytes for a communication, and copying them twice would cost the device more than it
saves. But each launch costs the host, which small batches keep busier than the device. So they wait for each other as
small ones do; then one copy brings their gradients together, and one launch of several communications reduces them.

Each parameter of a unit may be cut by itself, into a segment. The segments of such units, of up to
``thresholds.SIDE_BY_SIDE_NBYTES`` each, go by one communication, too, whatever their number: one for each would cost
the host a launch and a sum each.

A module may have several units, whose gradients arrive at once. Those of the same groups go in one launch whatever
their sizes: one by one, the first reduction would have to end before the third unit's input gets memory, with nothing
to compute beside it.

Units of other groups, or of another dtype, cannot be in the same communication. Each kind has a bucket of its own, and
none ends another's: dense and expert units come in turns, and would all travel alone. What waits holds its gradients,
and the memory of those that were computed in place: a bucket's limit at most for each kind. More kinds than
``thresholds.OPEN_BUCKETS`` do not wait at once: the bucket that was opened first is issued for the next. Buckets that
are open when backward ends are issued in the order in which they were opened.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from . import thresholds

T = TypeVar("T")


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


def alike(items: Iterable[T], kinds: Iterable[Hashable]) -> list[list[T]]:
    """``items`` of each of ``kinds`` together, one kind an item, in the order in which the kinds come up."""
    found: dict[Hashable, list[T]] = {}
    for item, kind in zip(items, kinds, strict=True):
        found.setdefault(kind, []).append(item)
    return list(found.values())


class ReduceMode(enum.Enum):
    """How a unit is reduced: see [Note: buckets]."""

    ALONE = "alone"
    """At once, by itself."""
    GROUPED = "grouped"
    """By a communication of its own, in one launch with others."""
    MERGED = "merged"
    """By one communication with others."""

    # Look-ups in each step; that of ``Enum`` is in Python.
    __hash__ = object.__hash__


@dataclass(eq=False, slots=True)
class Bucket(Generic[T]):
    """Units whose gradients are reduced by one launch."""

    mode: ReduceMode
    members: list[T]
    nbytes: int
    """Of all members, as launches are planned."""


class Buckets(Generic[T]):
    """Which units' reductions go together, and when they are issued. It holds nothing but the open buckets.

    Args:
        limit: Bytes that wait at most in one bucket; 0 to send each reduction by itself.
    """

    def __init__(self, limit: int) -> None:
        grouped, merged = min(limit, thresholds.GROUPED_NBYTES), min(limit, thresholds.MERGED_NBYTES)
        #: Bytes up to which units of a mode are sent together.
        self.limits = {ReduceMode.ALONE: 0, ReduceMode.GROUPED: grouped, ReduceMode.MERGED: merged}
        # By kind, the one that was opened first at the beginning.
        self._open: dict[Hashable, Bucket[T]] = {}

    def mode_of(self, nbytes: int, scatters: bool) -> ReduceMode:
        """How a unit of ``nbytes`` is reduced. ``scatters``: each rank keeps a part of the result."""
        if not scatters:
            return ReduceMode.ALONE
        if nbytes * thresholds.FEWEST_MERGED <= self.limits[ReduceMode.MERGED]:
            return ReduceMode.MERGED
        grouped = nbytes <= thresholds.LARGEST_GROUPED and nbytes * 2 <= self.limits[ReduceMode.GROUPED]
        return ReduceMode.GROUPED if grouped else ReduceMode.ALONE

    def mode_of_module(self, sizes: Sequence[int], scatters: bool) -> ReduceMode:
        """How units of one module and of one kind, of ``sizes`` bytes, are reduced."""
        if len(sizes) == 1 or not scatters:
            return self.mode_of(max(sizes), scatters)
        merges = sum(sizes) <= self.limits[ReduceMode.MERGED] and self.mode_of(max(sizes), True) is ReduceMode.MERGED
        return ReduceMode.MERGED if merges else ReduceMode.GROUPED

    def put(self, kind: Hashable, members: Sequence[T], nbytes: int, mode: ReduceMode) -> list[Bucket[T]]:
        """Let ``members`` wait for others of the same ``kind`` and ``mode``; returns what is due now, in this order.

        ``members``: one unit, or several that stay together, of ``nbytes`` in all. Units of one ``kind`` may be reduced
        by one communication.
        """
        due = []
        limit = self.limits[mode]
        bucket = self._open.get(kind)
        if bucket is not None and (bucket.mode is not mode or bucket.nbytes + nbytes > limit):
            due.append(self._open.pop(kind))
            bucket = None
        if bucket is None:
            bucket = self._open[kind] = Bucket(mode, [], 0)
        bucket.members += members
        bucket.nbytes += nbytes
        if bucket.nbytes + nbytes > limit or mode is ReduceMode.ALONE:
            # The next is likely of the same size: do not wait for it.
            due.append(self._open.pop(kind))
        elif len(self._open) > thresholds.OPEN_BUCKETS:
            due.append(self._open.pop(next(iter(self._open))))
        return due

    def close(self) -> list[Bucket[T]]:
        """All that wait, in the order in which they were opened; none does any more."""
        due = list(self._open.values())
        self._open.clear()
        return due
