"""What a layout answered for a unit, checked before anything is cut by it, and refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, PluginContractError
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
            ConfigError: the layout did, for what the user asked of it.
            PluginContractError: the layout failed, or answered what its contract does not allow.
        """
        where = f"{self.described} for unit '{unit.name}' of {unit.shards} shards (rank {rank})"
        try:
            answer: Any = self.layout.arrange(unit)
            buffers: Any = tuple(answer) if isinstance(answer, Sequence) else None
        except KeyboardInterrupt:
            raise
        except ConfigError as error:
            raise ConfigError(f"arrange() of {where} refused: {error}") from error
        # SystemExit too: one rank would end in silence, and the others wait for it.
        except BaseException as error:
            raise PluginContractError(f"arrange() of {where} failed: {type(error).__name__}: {error}") from error
        fault = _fault(unit, answer, buffers)
        if fault:
            raise PluginContractError(f"arrange() of {where} answered {fault}.")
        return tuple((each.order, laid_out(unit.parameters, each, unit.shards)) for each in buffers)


def _fault(unit: UnitGeometry, answer: Any, buffers: Any) -> str:
    """What of ``answer``, ``buffers`` as a tuple, the contract does not allow, and what to answer instead; empty for
    nothing."""
    if buffers is None or not all(isinstance(each, Arrangement) for each in buffers):
        return f"{answer!r}, which is no sequence of Arrangements. Return one for each buffer, nearly always one"
    taken: set[int] = set()
    for each in buffers:
        known = len(unit.parameters)
        if not _are_numbers(each.order) or max(each.order, default=-1) >= known:
            return f"the order {each.order!r}, of {known} parameters. Answer a tuple of their indices, from 0"
        for index in each.order:
            if index in taken:
                return f"'{unit.parameters[index].name}' twice. Let each parameter lie in one buffer, once"
            taken.add(index)
    missing = [each.name for index, each in enumerate(unit.parameters) if index not in taken]
    if missing:
        return f"no place for '{missing[0]}'. Let each parameter lie in one buffer, empty ones too"
    return next((fault for fault in (_fault_of(unit, each) for each in buffers) if fault), "")


def _are_numbers(values: Any) -> bool:
    """Whether ``values`` is a tuple of ints that are not negative, and not bools."""
    return isinstance(values, tuple) and {*map(type, values)} <= {int} and min(values, default=0) >= 0


def _fault_of(unit: UnitGeometry, arrangement: Arrangement) -> str:
    size, offsets = arrangement.shard_numel, arrangement.offsets
    if not _are_numbers(offsets) or not _are_numbers((size,)):
        return f"{arrangement!r}, whose offsets and sizes are not all numbers of elements. Answer with ints in a tuple"
    if not arrangement.order or len(offsets) != len(arrangement.order):
        return f"{len(offsets)} offsets for {len(arrangement.order)} parameters in one buffer. Answer one for each"
    end, before, alignment = 0, "", unit.alignment
    for index, offset in zip(arrangement.order, offsets, strict=True):
        parameter = unit.parameters[index]
        if offset < end:
            return (
                f"the offset {offset} for '{parameter.name}', but '{before}' ends at {end}: they overlap, or are "
                "not in the order of their offsets"
            )
        if offset % alignment:
            return (
                f"the offset {offset} for '{parameter.name}', which is no multiple of {alignment} elements. Align each "
                "parameter to UnitGeometry.alignment"
            )
        end, before = offset + parameter.numel, parameter.name
    if end > size * unit.shards:
        return (
            f"slices of {size} elements, {size * unit.shards} together, but '{before}' ends at {end}. Make slices "
            "longer"
        )
    if size != unit.aligned_slice(size) and not arrangement.exact:
        return (
            f"slices of {size} elements, which is no multiple of {unit.slice_alignment(size)}. Round it up by "
            "UnitGeometry.aligned_slice"
        )
    return "" if arrangement.by_rows == frozenset() else _fault_of_rows(unit, arrangement)


def _fault_of_rows(unit: UnitGeometry, arrangement: Arrangement) -> str:
    by_rows: Any = arrangement.by_rows
    if not isinstance(by_rows, frozenset) or not by_rows.issubset(arrangement.order):
        return f"by_rows {by_rows!r}. Answer a frozenset of indices of parameters of that buffer"
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
