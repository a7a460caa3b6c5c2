"""The picture of an explanation: units as a tree, the bytes that each gathers and keeps, and the ranks sharing it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyshard.planning.launches import batch_ends

from .. import pictures
from .explanation import ExplainedUnit, Explanation, folded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: One for each group of ranks, in turn.
_COLOURS = ("#1d4ed8", "#15803d", "#b45309", "#7e22ce", "#0e7490", "#be123c")
_GREY, _LINE = "#666666", "#999999"
#: Inches: of the picture, where columns of it begin, and of a step into the tree.
_WIDTH, _BARS, _WORDS, _INDENT = 13.0, 4.9, 8.3, 0.22
#: Inches of a row, of a replica, and of the words around these.
_ROW, _REPLICA, _HEADER = 0.52, 0.17, 0.95
#: Letters of a name, and of the names of parameters below it.
_LETTERS, _SMALL_LETTERS = 46, 60
#: Shards and replicas that are drawn of a group.
_COLUMNS, _REPLICAS = 8, 4
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


@dataclass(frozen=True, slots=True)
class Row:
    """Units that are alike, each inside of the same kind of module."""

    units: tuple[ExplainedUnit, ...]
    parent: int | None
    """Index of the row that has the unit around each; None for the outermost."""
    depth: int
    """How many rows are around it."""
    together: int
    """Units in the launch that gathers one of them, at most; 0 where it is not gathered."""

    @property
    def first(self) -> ExplainedUnit:
        """Stands for all."""
        return self.units[0]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of one unit while it is whole."""
        return _whole_nbytes(self.first) or self.first.elements * self.first.compute.itemsize

    @property
    def held_nbytes(self) -> int:
        """Bytes of one unit that each rank keeps: its shard of the master."""
        return self.first.shard_elements * self.first.master.itemsize


def rows_of(explanation: Explanation) -> list[Row]:
    """The units of ``explanation``, such as are alike together: neighbours, or the same place of a repeated pattern.

    Launches are those of modules that run in the order in which the model has them.
    """
    together = _together(explanation)
    found: list[Row] = []
    for units in folded(explanation.units, [_likeness(unit) for unit in explanation.units]):
        module = _module_of(units[0])
        around = [
            index
            for index, row in enumerate(found)
            if module and ((outer := _module_of(row.first)) == "" or module.startswith(f"{outer}."))
        ]
        parent = max(around, key=lambda index: len(_module_of(found[index].first)), default=None)
        depth = 0 if parent is None else found[parent].depth + 1
        found.append(Row(units, parent, depth, max(together[unit.name] for unit in units)))
    return found


def draw(explanation: Explanation, file: str | Path) -> None:
    """Draw ``explanation`` into ``file``, as SVG, PNG or PDF by its ending.

    Raises ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    rows = rows_of(explanation)
    groups = list(dict.fromkeys(_group_of(unit) for unit in explanation.units))
    height = _ROW * (len(rows) + 1)
    header = _HEADER + _REPLICA * min(_REPLICAS, max((replicas for *_, replicas in groups), default=1))
    figure = pictures.blank(_WIDTH, header + height)
    above, below = figure.subplots(2, 1, height_ratios=(header, height))
    for axes, top in ((above, header), (below, height)):
        axes.set_axis_off()
        axes.set_xlim(0, _WIDTH)
        axes.set_ylim(-top, 0)
    _write(above, 0, -0.1, explanation.headline, size=11)
    for index, group in enumerate(groups):
        _draw_group(above, index * _WIDTH / len(groups), group, _colour(index))
    _draw_rows(below, explanation, rows, groups)
    pictures.write(figure, file)


#: The dimensions of the mesh, in words; shards; replicas.
_Group = tuple[str, int, int]


def _draw_group(axes: Axes, left: float, group: _Group, colour: str) -> None:
    """A grid of ranks: a column for each shard, a row for each replica."""
    ranks, shards, replicas = group
    columns, lines = min(shards, _COLUMNS), min(replicas, _REPLICAS)
    cut = f"{shards:,} shards" if shards > 1 else "not cut"
    _write(
        axes, left, -0.42, f"{ranks or 'all ranks'}: {cut}, {replicas:,} {'replica' if replicas == 1 else 'replicas'}"
    )
    for column in range(columns):
        bars = [(left + 0.2 * column, 0.17)]
        for line in range(lines):
            shade = 0.35 + 0.65 * column / max(1, columns - 1)
            axes.broken_barh(bars, (-0.76 - _REPLICA * line, 0.14), facecolor=colour, alpha=shade, linewidth=0)
    if shards > columns or replicas > lines:
        _write(axes, left + 0.2 * columns + 0.05, -0.72, "and so on", size=7, colour=_GREY)
    if replicas > 1:
        _write(axes, left, -0.72 - _REPLICA * lines, "a column has the same shard", size=7, colour=_GREY)


def _draw_rows(axes: Axes, explanation: Explanation, rows: Sequence[Row], groups: Sequence[_Group]) -> None:
    scale = (_WORDS - _BARS - 0.3) / max((max(row.gathered_nbytes, row.held_nbytes) for row in rows), default=1)
    for index, row in enumerate(rows):
        middle, left = -_ROW * (index + 0.5), _INDENT * row.depth
        if row.parent is not None:
            # From below the outer unit's name, down and to the right.
            corner = left - _INDENT + 0.08
            axes.plot([corner, corner], [-_ROW * (row.parent + 0.95), middle], color=_LINE, linewidth=0.8)
            axes.plot([corner, left - 0.03], [middle, middle], color=_LINE, linewidth=0.8)
        first, last = row.first, row.units[-1]
        name = first.name if len(row.units) == 1 else f"{first.name} to {last.name}"
        times = f"  {len(row.units)} x" if len(row.units) > 1 else " "
        _write(axes, left, middle + 0.09, f"{_short(name, _LETTERS)}{times} {first.module_class}")
        _write(axes, left, middle - 0.12, _parameters(first), size=7, colour=_GREY)
        colour = _colour(groups.index(_group_of(first)))
        for nbytes, opacity in ((row.gathered_nbytes, 0.3), (row.held_nbytes, 1.0)):
            axes.broken_barh([(_BARS, nbytes * scale)], (middle - 0.09, 0.18), facecolor=colour, alpha=opacity)
        _write(axes, _WORDS, middle + 0.09, _sizes(row))
        _write(axes, _WORDS, middle - 0.12, _ways(row), size=7, colour=_GREY)
    held = sum(row.held_nbytes * len(row.units) for row in rows)
    below = -_ROW * (len(rows) + 0.5)
    _write(
        axes,
        0,
        below,
        f"{len(explanation.units)} units of {explanation.elements:,} elements; each rank keeps {_size(held)} of them. "
        "Bars are bytes of one unit: pale while it is whole, dark what each rank keeps.",
        size=8,
    )


def _sizes(row: Row) -> str:
    unit, many = row.first, f"{len(row.units)} x " if len(row.units) > 1 else ""
    kept = f"{many}{_size(row.held_nbytes)} on each rank, {_dtype(unit.master)}"
    if not row.together:
        return kept
    carried = "encoded" if unit.encoded else _dtype(unit.compute)
    return f"{_size(row.gathered_nbytes)} gathered, {carried}; {kept}"


def _ways(row: Row) -> str:
    """How the units are gathered, and what they have of their own."""
    unit = row.first
    words = [f"{row.together} units a gather" if row.together > 1 else "a gather by itself" if row.together else ""]
    words += ["" if unit.trained else "frozen"]
    words += [f"{name} of its own" for name in unit.overrides]
    return ", ".join(filter(None, words))


def _parameters(unit: ExplainedUnit) -> str:
    prefix = f"{module}." if (module := _module_of(unit)) else ""
    names = [each.name.removeprefix(prefix) for each in unit.parameters]
    shown = len(names)
    while shown > 1 and len(", ".join(names[:shown])) > _SMALL_LETTERS:
        shown -= 1
    more = f" and {len(names) - shown} more" if shown < len(names) else ""
    return _short(", ".join(names[:shown]), _SMALL_LETTERS) + more


def _together(explanation: Explanation) -> dict[str, int]:
    """How many units share the launch that gathers each, by name: 0 for such as are whole on each rank."""
    limit = next((each.value for each in explanation.settings if each.name == "batch_nbytes"), 0)
    found = dict.fromkeys((unit.name for unit in explanation.units), 0)
    gathered = [unit for unit in explanation.units if unit.gather_nbytes]
    # The first one is entered before anything can be gathered ahead.
    found.update({unit.name: 1 for unit in gathered[:1]})
    behind = gathered[1:]
    ends = batch_ends([_whole_nbytes(unit) for unit in behind], limit)
    for unit, end in zip(behind, ends, strict=True):
        found[unit.name] = ends.count(end)
    return found


def _whole_nbytes(unit: ExplainedUnit) -> int:
    return unit.gather_nbytes * unit.shards


def _likeness(unit: ExplainedUnit) -> Hashable:
    """Equal for units of which the picture says the same."""
    sizes = unit.elements, unit.shard_elements, unit.gather_nbytes, unit.encoded, unit.trained
    return unit.module_class, _parameters(unit), *sizes, unit.master, unit.compute, *unit.overrides, *_group_of(unit)


def _group_of(unit: ExplainedUnit) -> _Group:
    return unit.ranks, unit.shards, unit.replicas


def _module_of(unit: ExplainedUnit) -> str:
    """Name of the unit's module in the model; empty for the model itself."""
    return unit.name.partition("[")[0].replace("(root)", "")


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _write(axes: Axes, x: float, y: float, text: str, *, size: float = 9, colour: str = "black") -> None:
    # A dollar sign in a name is no formula.
    axes.text(x, y, text, fontsize=size, color=colour, va="center", parse_math=False)


def _short(text: str, most: int) -> str:
    """``text`` without its middle, where it is too long."""
    return text if len(text) <= most else f"{text[: most // 2 - 2]} … {text[-(most // 2 - 1) :]}"


def _size(nbytes: int) -> str:
    size, unit = next((each for each in _UNITS if nbytes >= each[0]), _UNITS[-1])
    return f"{nbytes:,} {unit}" if size == 1 else f"{nbytes / size:.1f} {unit}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
