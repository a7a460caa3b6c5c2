"""The parameters for which any rank had a gradient in one backward.

Ranks reduce the gradients of all trained parameters, with zeros where a rank has no gradient. Where no rank has any,
autograd on a whole model would leave ``.grad`` alone, and an optimizer distinguishes None from zeros: it decays weights
and averages for zeros, and not for None. Reduced gradients do not show the difference, so ranks add up, once a
backward, how many of them had a gradient of each parameter.

A rank reads the result, and waits for it, only if it lacks a gradient of a parameter that it holds. For the others it
is one more small reduction behind the last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from ..interfaces import Collectives, ReduceOp
from .streams import CommStreams, Reduction
from .unit import Unit


class UsedParameters:
    """Counts, for each parameter of ``units``, the ranks that had a gradient in a backward."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self._units = tuple(units)
        self._collectives = collectives
        self._exchanges = collectives.world_size > 1 and collectives.capabilities.can_communicate
        # Units of experts have other parameters in each group of ranks, and a place in the sum for each of these.
        groups = [1 if all(each.part for each in unit.parameters) else unit.ranks.ep_degree for unit in self._units]
        sizes = [len(unit.parameters) for unit in self._units]
        pairs = zip(groups, sizes, strict=True)
        *begins, numel = accumulate((number * size for number, size in pairs), initial=0)
        own = [unit.ranks.place if number > 1 else 0 for unit, number in zip(self._units, groups, strict=True)]
        self._places = [begin + place * size for begin, place, size in zip(begins, own, sizes, strict=True)]
        self._counts = torch.ones(numel, dtype=torch.float32, device=collectives.device)
        others = torch.ones(numel, dtype=torch.bool)
        for place, size in zip(self._places, sizes, strict=True):
            others[place : place + size] = False
        #: Places of other groups' parameters; None where there are none.
        self._others = others.nonzero()[:, 0].to(collectives.device) if max(groups, default=1) > 1 else None
        self._known = False
        #: Whether any unit has zeros in the place of gradients that no rank had (``Gradients.unfilled``).
        self.unfilled = False
        self._missed: list[tuple[Unit, int, frozenset[int]]] = []

    def exchange(self, streams: CommStreams) -> None:
        """Issue the sum; called on every rank, behind a backward's last reduction."""
        self._missed = [
            (unit, place, unit.gradients.missed)
            for unit, place in zip(self._units, self._places, strict=True)
            if unit.gradients.reduced and unit.gradients.missed
        ]
        counts = self._counts
        capturing = counts.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._known = not capturing and counts.numel() > 0
        if not self._known or not (self._exchanges or self._missed):
            return
        counts.fill_(1.0)
        if self._others is not None:
            counts.index_fill_(0, self._others, 0.0)
        if self._missed:
            absent = [place + index for _, place, missed in self._missed for index in missed]
            counts.index_fill_(0, torch.tensor(absent, device=counts.device), 0.0)
        if self._exchanges:
            total = partial(self._collectives.all_reduce, counts, op=ReduceOp.SUM)
            streams.reduce(Reduction(total, _nothing, _nothing), ())

    def drop_unused(self) -> None:
        """Set gradients that no rank had to None; called behind ``CommStreams.drain``.

        Inside the capture of a CUDA graph nothing can be read: the graph keeps the result of the last step before it.
        """
        bare = [(unit, place) for unit, place, _ in self._missed if unit.gradients.bare]
        if bare and self._known:
            found = self._counts.tolist()
            for unit, place in bare:
                counts = found[place : place + len(unit.parameters)]
                unit.gradients.unused = frozenset(index for index, count in enumerate(counts) if not count)
        for unit, _ in bare:
            unit.gradients.drop(unit.gradients.bare & unit.gradients.unused)
        if bare or self.unfilled:
            self.unfilled = any(unit.gradients.unfilled for unit in self._units)
        self._missed = []


def _nothing() -> None:
    """The sum is delivered and retired without a call."""
