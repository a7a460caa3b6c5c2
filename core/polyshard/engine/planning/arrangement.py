"""What a layout answered for a unit, checked before anything is cut by it, and refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import PluginContractError, PolyshardError
from ...interfaces import Arrangement, Layout, UnitGeometry
from .layout import FlatLayout, laid_out


@dataclass(frozen=True, slots=True)
class NamedLayout:
    """A layout, and how messages name it."""

    layout: Layout
    described: str
    """The plugin, its group and the package that it is from."""

    def arrange(self, unit: UnitGeometry, rank: int) -> tuple[tuple[tuple[int, ...], FlatLayout], ...]:
        """The buffers of ``unit``: indices of its parameters, in the order in which they lie, and where.

        Raises:
            PluginContractError: the layout failed, or answered what its contract does not allow.
        """
        where = f"{self.described} for unit '{unit.name}' of {unit.shards} shards (rank {rank})"
        try:
            answer: Any = self.layout.arrange(unit)
        except PolyshardError:
            raise
        except Exception as error:
            raise PluginContractError(f"arrange() of {where} failed: {type(error).__name__}: {error}") from error
        fault = _fault(unit, answer)
        if fault:
            raise PluginContractError(f"arrange() of {where} answered {fault}.")
        return tuple((each.order, laid_out(unit.parameters, each, unit.shards)) for each in answer)


def _fault(unit: UnitGeometry, answer: Any) -> str:
    """What of ``answer`` the contract does not allow, and what to answer instead; empty for nothing."""
    if not isinstance(answer, Sequence) or not all(isinstance(each, Arrangement) for each in answer):
        return f"{answer!r}, which is no sequence of Arrangements. Return one for each buffer, nearly always one"
    taken = [index for each in answer for index in each.order]
    if sorted(taken, key=repr) != sorted(range(len(unit.parameters)), key=repr):
        return (
            f"buffers of the parameters {taken}, but the unit has {len(unit.parameters)}, counted from 0. Let each lie "
            "in one buffer, once"
        )
    return next((fault for fault in (_fault_of(unit, each) for each in answer) if fault), "")


def _fault_of(unit: UnitGeometry, arrangement: Arrangement) -> str:
    size, offsets = arrangement.shard_numel, arrangement.offsets
    numbers = (size, *offsets) if isinstance(offsets, tuple) else (None,)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        return f"{arrangement!r}, whose offsets and sizes are not all numbers of elements. Answer with ints in a tuple"
    if not arrangement.order or len(offsets) != len(arrangement.order):
        return f"{len(offsets)} offsets for {len(arrangement.order)} parameters in one buffer. Answer one for each"
    end, before = 0, ""
    for index, offset in zip(arrangement.order, offsets, strict=True):
        parameter = unit.parameters[index]
        if offset < end:
            return (
                f"the offset {offset} for '{parameter.name}', but '{before}' ends at {end}: they overlap, or are "
                "not in the order of their offsets"
            )
        if offset % unit.alignment:
            return (
                f"the offset {offset} for '{parameter.name}', which is no multiple of {unit.alignment} elements. Align "
                "each parameter to UnitGeometry.alignment"
            )
        end, before = offset + parameter.numel, parameter.name
    if end > size * unit.shards:
        return (
            f"slices of {size} elements, {size * unit.shards} together, but '{before}' ends at {end}. Make slices "
            "longer"
        )
    if size != unit.aligned_slice(size):
        return (
            f"slices of {size} elements, which is no multiple of {unit.slice_alignment(size)}. Round it up by "
            "UnitGeometry.aligned_slice"
        )
    return _fault_of_rows(unit, arrangement)


def _fault_of_rows(unit: UnitGeometry, arrangement: Arrangement) -> str:
    if not isinstance(arrangement.by_rows, frozenset) or not arrangement.by_rows.issubset(arrangement.order):
        return f"by_rows {arrangement.by_rows!r}. Answer a frozenset of indices of parameters of that buffer"
    size = arrangement.shard_numel
    for index, offset in zip(arrangement.order, arrangement.offsets, strict=True):
        if index not in arrangement.by_rows:
            continue
        parameter = unit.parameters[index]
        row = parameter.row_numel
        if row is None:
            return f"'{parameter.name}' by rows, but its rows do not lie together in memory"
        if row and any((end - offset) % row for end in _cuts(offset, parameter.numel, size)):
            return (
                f"'{parameter.name}' by rows of {row} elements, but slices of {size} cut one of them: it begins at "
                f"{offset}"
            )
    return ""


def _cuts(offset: int, numel: int, size: int) -> Sequence[int]:
    """The ends of slices inside of a parameter. Behind the second one their distances to it repeat."""
    first = (offset // size + 1) * size if size else numel
    return range(first, offset + numel, size)[:2] if size else ()
