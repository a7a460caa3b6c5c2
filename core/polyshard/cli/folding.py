"""Rows that repeat, shown once: forty equal blocks are one line of a table."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

_T = TypeVar("_T")

#: The longest pattern that is looked for: the units of one block.
_LONGEST = 64


@dataclass(frozen=True, slots=True)
class Fold(Generic[_T]):
    """Equal items that come again at equal distances."""

    items: tuple[_T, ...]
    """At least one, in their order."""


def folded(items: Sequence[_T], keys: Sequence[Hashable]) -> list[Fold[_T]]:
    """``items``, of which those with equal ``keys`` are together that follow each other directly, or as part of a
    pattern of several that is repeated as a whole: a b a b a b is two folds of three."""
    found: list[Fold[_T]] = []
    start = 0
    while start < len(items):
        period, times = _longest_repetition(keys, start)
        for position in range(start, start + period):
            found.append(Fold(tuple(items[position : start + period * times : period])))
        start += period * times
    return found


def _longest_repetition(keys: Sequence[Hashable], start: int) -> tuple[int, int]:
    """Length of the pattern that begins at ``start`` and goes furthest, and how often it comes; (1, 1) for none."""
    best = (1, 1)
    for period in range(1, min(_LONGEST, (len(keys) - start) // 2) + 1):
        pattern = keys[start : start + period]
        times = next(
            number for number in count(1) if keys[start + period * number : start + period * (number + 1)] != pattern
        )
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best
