"""Sets of times, as sorted lists of intervals that do not touch."""

from __future__ import annotations

from collections.abc import Iterable

#: From the first to the second, in one unit of time.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times that are in at least one of ``intervals``; empty and reversed ones hold no time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(kept: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """The times that are in ``kept`` and not in ``removed``."""
    holes = union(removed)
    rest: list[Interval] = []
    first = 0
    for start, end in union(kept):
        # Holes before this interval are before all that follow, too.
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        cursor = start
        for hole_start, hole_end in holes[first:]:
            if hole_start >= end:
                break
            if hole_start > cursor:
                rest.append((cursor, hole_start))
            cursor = max(cursor, hole_end)
        if cursor < end:
            rest.append((cursor, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """How much time ``intervals`` cover; what two of them share counts once."""
    return sum(end - start for start, end in union(intervals))
