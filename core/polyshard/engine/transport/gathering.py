"""What lanes gather: the slices of units, written and sent together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import torch

from ...interfaces import Collectives, UnitSpec, Work
from .. import _torch_private
from ..planning.answers import issued
from .buffer import FlatBuffer
from .wire import EncodedGather, EncodedUnit, EncodedUnits


class Gatherable(Protocol):
    """What lanes need of a unit."""

    spec: UnitSpec
    buffer: FlatBuffer
    master: torch.Tensor
    #: Where it was used since its gather, as ``Lanes.here`` says.
    places: list[object]
    #: Whether ``master`` lies where ``fetch`` alone reads it.
    parks: bool
    #: How it travels; None for as ``buffer`` is.
    encoded: EncodedGather | None

    @property
    def gather_group(self) -> Collectives | None:
        """The ranks that ``buffer`` is gathered over; None where it is local."""

    @property
    def source(self) -> torch.Tensor:
        """The master on the device: a parked one is fetched."""

    def fetch(self) -> None:
        """Write the own slice from a parked master."""

    @property
    def allocation(self) -> AbstractContextManager[Any]:
        """The backend's memory for gathers."""

    def fill(self) -> Work:
        """Write the own slice and start the gather."""

    def filling(self) -> None:
        """The gather starts at the present point of the current stream, by other means than ``fill``."""

    def filled(self) -> None:
        """The gather ends at the present point of the current stream."""


_group_of = attrgetter("gather_group")


def fill(units: Sequence[Gatherable]) -> Sequence[Work]:
    """Write the own slices of attached units, and start their gathers."""
    if len(units) == 1:
        return (units[0].fill(),)
    works: list[Work] = []
    together: Iterable[tuple[Collectives | None, Iterable[Gatherable]]] = groupby(units, _group_of)
    for group, members in together:
        if group is None:
            works += [unit.fill() for unit in members]
            continue
        gathered = list(members)
        for unit in gathered:
            unit.filling()
        plain = [unit for unit in gathered if unit.encoded is None]
        here = [unit for unit in plain if not unit.parks]
        if here:
            # The cast is the copy-in, as in ``fill``.
            _torch_private.foreach_copy_([unit.buffer.own for unit in here], [unit.master for unit in here])
        if len(here) < len(plain):
            for unit in plain:
                if unit.parks:
                    unit.fetch()
        pairs = [(unit.buffer.flat, unit.buffer.own) for unit in plain]
        if len(plain) == len(gathered):
            works.append(issued(group.all_gather_many(pairs), "all_gather_many", group, ""))
            continue
        encoded = EncodedUnits(
            group,
            [
                EncodedUnit(unit.encoded, unit.spec, unit.source, unit.buffer.flat)
                for unit in gathered
                if unit.encoded is not None
            ],
        )
        work = issued(group.all_gather_many(pairs + encoded.pairs), "all_gather_many", group, "")
        works.append(encoded.behind(work))
    return works
