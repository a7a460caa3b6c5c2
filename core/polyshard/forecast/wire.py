"""Bytes between ranks in one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..runtime.root import Root
from ..runtime.unit import Unit
from .links import Operation
from .recording import Issued, Transfer


@dataclass(frozen=True, slots=True)
class Wire:
    """What one kind of collective carries in a step."""

    operation: Operation
    ranks: int
    launches: int
    collectives: int
    """A launch may carry several."""
    received_nbytes: int
    """Bytes that reach one rank; as many leave it."""


def wire_of_step(issued: Iterable[Issued]) -> tuple[Wire, ...]:
    """Added up over what a step issued, by operation and number of ranks."""
    found: dict[tuple[Operation, int], Wire] = {}
    for each in issued:
        if isinstance(each, Transfer):
            key = each.operation, each.span.ranks
            before = found.get(key, Wire(*key, 0, 0, 0))
            found[key] = Wire(
                *key,
                before.launches + 1,
                before.collectives + each.members,
                before.received_nbytes + each.received_nbytes,
            )
    return tuple(found.values())


def wire_of_layout(root: Root) -> tuple[Wire, ...]:
    """The same, read off the units: for models whose forward is not run.

    Each unit is gathered for forward and, where it was released, for backward; each trained one is reduced. What the
    first forward would show is not known: the unit that ran last may be kept, and an embedding is not gathered twice.
    Launches are counted as if nothing travelled together.
    """
    rows: list[Wire] = []
    outermost = root.module_states[0].units
    for operation in Operation:
        carried = [found for unit in root.units for found in _carried(unit, operation, unit in outermost)]
        for ranks in sorted({size for _, size in carried}):
            those = [nbytes for nbytes, size in carried if size == ranks]
            received = sum(operation.received_nbytes(nbytes, ranks) for nbytes in those)
            rows.append(Wire(operation, ranks, len(those), len(those), received))
    return tuple(rows)


def _carried(unit: Unit, operation: Operation, turns: bool) -> list[tuple[int, int]]:
    """Whole bytes and ranks of each collective of ``operation`` that ``unit`` takes part in.

    ``turns``: its backward follows its forward at once.
    """
    grid = unit.grid
    if operation is Operation.ALL_GATHER:
        if grid.shard is None or unit.permanent:
            return []
        return [(unit.gathered_nbytes, grid.shard_size)] * (2 if unit.releases(turns) else 1)
    if not unit.trainable or unit.resident:
        return []
    reduction = unit.gradients.input
    if operation is Operation.REDUCE_SCATTER:
        return [] if grid.shard is None else [(reduction.nbytes, grid.shard_size)]
    if grid.replicate is None:
        return []
    whole = grid.shard is None
    nbytes = reduction.nbytes if whole else reduction.layout.shard_numel * reduction.result_dtype.itemsize
    return [(nbytes, grid.replicate.world_size)]
