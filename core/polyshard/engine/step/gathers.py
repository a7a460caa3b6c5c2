"""Gathers of several units at once: those of a stage that is entered, and of stages that are prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .unit import Unit, unshard_together


class Prefetched(Protocol):
    """What prefetching needs of a stage."""

    units: tuple[Unit, ...]

    def unshard(self) -> None:
        """Issue the gathers of all units."""


def show_whole(units: Sequence[Unit], training: bool, *, recomputes: bool) -> None:
    """Gather ``units``, order compute behind that, and let modules see whole parameters."""
    for unit in units:
        unit.choose_buffer(training)
        unit.unshard()
    for unit in units:
        unit.wait()
        unit.show()
        for observer in unit.observers:
            observer.compute(unit.spec, recomputes)


def unshard_ahead(batches: Sequence[Sequence[Prefetched]]) -> None:
    """Issue the gathers of ``batches``, each as one communication."""
    for batch in batches:
        first = batch[0]
        if len(batch) == 1:
            first.unshard()
        elif any(unit.due for unit in first.units):
            # A stage may come up twice in a batch.
            units = dict.fromkeys(unit for stage in batch for unit in stage.units)
            unshard_together([unit for unit in units if unit.due])
