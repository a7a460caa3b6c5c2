"""The picture of an explanation: the bytes that each unit gathers and keeps, and the ranks that share it."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from .. import pictures
from .explanation import ExplainedUnit, Explanation, folded, plain

#: One for each group of ranks, in turn.
_COLOURS = ("#1d4ed8", "#15803d", "#b45309", "#7e22ce", "#0e7490", "#be123c")
#: Inches: of the picture, of a row of units, and of what is around these.
_WIDTH, _ROW, _AROUND = 13.0, 0.42, 1.2
#: Letters of a name.
_LETTERS = 60
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def draw(explanation: Explanation, file: str | Path) -> None:
    """Draw ``explanation`` into ``file``, as SVG, PNG or PDF by its ending. Units that are alike are one row.

    Raises ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    rows = folded(explanation.units, [_likeness(unit) for unit in explanation.units])
    figure = pictures.blank(_WIDTH, _AROUND + _ROW * len(rows))
    axes = figure.subplots()
    groups = list(dict.fromkeys(map(_group_of, explanation.units)))
    for place, row in enumerate(rows):
        unit, colour = row[0], _COLOURS[groups.index(_group_of(row[0])) % len(_COLOURS)]
        axes.barh(place, _gathered_nbytes(unit), 0.5, color=colour, alpha=0.3)
        axes.barh(place, _held_nbytes(unit), 0.5, color=colour)
        axes.annotate(_words(row), (1.01, place), xycoords=("axes fraction", "data"), fontsize=8, va="center")
    # A dollar sign in a name is no formula.
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    for index, (ranks, shards, replicas) in enumerate(groups):
        label = f"{ranks or 'all ranks'}: {shards:,} shards, {replicas:,} replicas"
        axes.barh(0, 0, color=_COLOURS[index % len(_COLOURS)], label=label)
    figure.legend(loc="outside lower left", ncols=len(groups), fontsize=8, frameon=False)
    held = sum(_held_nbytes(unit) for unit in explanation.units)
    figure.suptitle(
        f"{explanation.headline}\n{len(explanation.units)} units of {explanation.elements:,} elements; each rank keeps "
        f"{_size(held)} of them. Bars are bytes of one unit: pale while it is whole, dark what each rank keeps.",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    pictures.write(figure, file)


def _name(row: tuple[ExplainedUnit, ...]) -> str:
    name, many = row[0].name, f"{len(row)} x " if len(row) > 1 else ""
    name = f"{name} to {row[-1].name}" if many else name
    name = name if len(name) <= _LETTERS else f"{name[: _LETTERS // 2]} … {name[-_LETTERS // 2 :]}"
    return f"{name}  {many}{row[0].module_class}"


def _words(row: tuple[ExplainedUnit, ...]) -> str:
    unit, many = row[0], f"{len(row)} x " if len(row) > 1 else ""
    words = [f"{many}{_size(_held_nbytes(unit))} on each rank, {plain(unit.master)}"]
    if unit.gather_nbytes:
        carried = "encoded" if unit.encoded else plain(unit.compute)
        words.insert(0, f"{_size(_gathered_nbytes(unit))} gathered, {carried}")
    words += ["" if unit.trained else "frozen", *(f"{name} of its own" for name in unit.overrides)]
    return "; ".join(filter(None, words))


def _gathered_nbytes(unit: ExplainedUnit) -> int:
    """Bytes of the unit while it is whole."""
    return unit.gather_nbytes * unit.shards or unit.elements * unit.compute.itemsize


def _held_nbytes(unit: ExplainedUnit) -> int:
    """Bytes that each rank keeps: its shard of the master."""
    return unit.shard_elements * unit.master.itemsize


def _likeness(unit: ExplainedUnit) -> Hashable:
    """Equal for units of which the picture says the same."""
    parameters = tuple(each.shape for each in unit.parameters)
    return unit.module_class, parameters, _words((unit,)), *_group_of(unit)


def _group_of(unit: ExplainedUnit) -> tuple[str, int, int]:
    return unit.ranks, unit.shards, unit.replicas


def _size(nbytes: int) -> str:
    size, name = next((each for each in _UNITS if nbytes >= each[0]), _UNITS[-1])
    return f"{nbytes:,} {name}" if size == 1 else f"{nbytes / size:.1f} {name}"
