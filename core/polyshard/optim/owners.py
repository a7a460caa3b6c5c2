"""Who computes with which whole tensor, and in which order. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


def owners_of(works: Sequence[float], count: int) -> list[int]:
    """An owner in ``range(count)`` for each of ``works``, so that the largest sum of one is near the least possible.

    The longest first, each to whoever has least to do: at most 4/3 of the least possible (Graham 1969, "Bounds on
    multiprocessing timing anomalies").
    """
    loads = [(0.0, owner) for owner in range(count)]
    owners = [0] * len(works)
    for index in sorted(range(len(works)), key=lambda index: (-works[index], index)):
        load, owner = heapq.heappop(loads)
        owners[index] = owner
        heapq.heappush(loads, (load + works[index], owner))
    return owners


def rounds_of(
    owners: Sequence[int],
    count: int,
    works: Sequence[float],
    kinds: Sequence[Hashable],
    numels: Sequence[int],
    most: int,
) -> list[list[list[int]]]:
    """For each round, what each owner computes in it: indices of one kind, of at most ``most`` elements or one alone.

    All owners come from what takes long to what does not, so that those of one round take about as long as each other.
    """
    rounds: list[list[list[int]]] = []
    for owner in range(count):
        own = [index for index, its in enumerate(owners) if its == owner]
        own.sort(key=lambda index: (-works[index], index))
        # Kinds in the order of their first: one that is as long as another must not come in between its like.
        by_kind: dict[Hashable, list[int]] = {}
        for index in own:
            by_kind.setdefault(kinds[index], []).append(index)
        batches: list[list[int]] = []
        for members in by_kind.values():
            together = max(1, most // max(1, numels[members[0]]))
            batches += [members[start : start + together] for start in range(0, len(members), together)]
        for number, batch in enumerate(batches):
            if number == len(rounds):
                rounds.append([[] for _ in range(count)])
            rounds[number][owner] = batch
    return rounds
