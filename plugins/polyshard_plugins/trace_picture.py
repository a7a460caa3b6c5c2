"""A traced step as a picture: lanes over memory. matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ._trace_intervals import Interval, without
from .trace_step import Lane, Span, StepTrace, innermost, rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GATHER, _FORWARD, _BACKWARD, _REDUCE, _EXPOSED = "#1d4ed8", "#15803d", "#b45309", "#7e22ce", "#dc2626"
_ENCLOSING = 0.4
"""Opacity of what a module with other units inside computes between theirs."""
_ROWS = ("exposed", "reduce", "compute", "gather")
"""From the bottom to the top."""
_LETTER = 0.0075
"""Width of one letter, as a share of the step's."""
_MIB = 1 << 20


def draw_trace(trace: StepTrace, path: str | Path) -> None:
    """Draw ``trace`` into the file ``path``, as PNG, SVG or PDF by its ending.

    Raises ``ImportError`` without matplotlib.
    """
    # Not pyplot: that keeps figures, and picks a window system where there may be none.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    streams, memory = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_lanes(streams, trace)
    _draw_memory(memory, trace)
    memory.set_xlabel("ms from the begin of the step")
    memory.set_xlim(0, trace.duration_us / 1000 or 1)
    figure.suptitle(summary(trace), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)


def summary(trace: StepTrace) -> str:
    """One line: the step, how long it took, and how much of that is exposed communication."""
    return (
        f"Step {trace.step}, rank {trace.rank} on {trace.device}: {trace.duration_us / 1000:.2f} ms, "
        f"{trace.exposed_us / 1000:.2f} ms of it exposed communication ({trace.exposed_share:.1%})"
    )


def _draw_lanes(axes: Axes, trace: StepTrace) -> None:
    finished = [span for span in trace.spans if span.finished]
    compute = [span for span in finished if span.lane is Lane.COMPUTE]
    leaves = innermost(compute)
    inner = {id(span) for span in leaves}
    waits = _intervals(span for span in finished if span.lane is Lane.WAIT)
    whole = _Place("compute")
    for backward, colour in ((False, _FORWARD), (True, _BACKWARD)):
        same = [span for span in compute if span.backward is backward]
        _bars(axes, whole, without(_intervals(same), waits), colour, _ENCLOSING)
        label = "backward" if backward else "forward"
        own = _intervals(each for each in same if id(each) in inner)
        _bars(axes, whole, without(own, waits), colour, label=label)
    _write_names(axes, whole, leaves, trace.duration_us)
    for lane, colour in ((Lane.GATHER, _GATHER), (Lane.REDUCE, _REDUCE)):
        stacked = rows(span for span in finished if span.lane is lane)
        for number, spans in enumerate(stacked):
            place = _Place(lane.value, number, len(stacked))
            _bars(axes, place, _intervals(spans), colour, label=lane.value if number == 0 else None)
            _write_names(axes, place, spans, trace.duration_us)
    _bars(axes, _Place("exposed"), trace.exposed, _EXPOSED, label="exposed")
    axes.set_yticks(range(len(_ROWS)), _ROWS)
    axes.set_ylim(-0.5, len(_ROWS) - 0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=8)


class _Place(NamedTuple):
    """Where bars lie: in one of the equal parts of a row, from the top."""

    row: str
    part: int = 0
    parts: int = 1

    @property
    def height(self) -> float:
        return 0.8 / self.parts

    @property
    def bottom(self) -> float:
        return _ROWS.index(self.row) + 0.4 - (self.part + 1) * self.height


def _intervals(spans: Iterable[Span]) -> list[Interval]:
    return [span.interval for span in spans]


def _bars(
    axes: Axes, place: _Place, intervals: list[Interval], colour: str, opacity: float = 1.0, label: str | None = None
) -> None:
    bars = [(start / 1000, (end - start) / 1000) for start, end in intervals]
    across = (place.bottom, place.height)
    # Neighbours of one colour are told apart by a white edge, thin enough to leave something of short ones.
    axes.broken_barh(bars, across, facecolor=colour, alpha=opacity, edgecolor="white", linewidth=0.3, label=label)


def _write_names(axes: Axes, place: _Place, spans: Iterable[Span], duration_us: float) -> None:
    """Each unit's name, or its last part, where that fits into the bar."""
    for span in spans:
        room = (span.end_us - span.start_us) / (duration_us or 1)
        middle = ((span.start_us + span.end_us) / 2000, place.bottom + place.height / 2)
        for name in (span.unit, span.unit.rpartition(".")[2]):
            if len(name) * _LETTER < room:
                axes.annotate(name, middle, ha="center", va="center", fontsize=7, color="white", annotation_clip=True)
                break


def _draw_memory(axes: Axes, trace: StepTrace) -> None:
    at = [sample.at_us / 1000 for sample in trace.memory]
    gathered = [sample.gathered / _MIB for sample in trace.memory]
    axes.fill_between(at, gathered, step="post", color=_GATHER, alpha=0.35, linewidth=0, label="gather buffers")
    curves = (
        ("allocated", "-", [sample.allocated for sample in trace.memory]),
        ("reserved", ":", [sample.reserved for sample in trace.memory]),
    )
    for label, style, values in curves:
        known = [value / _MIB for value in values if value is not None]
        if len(known) == len(at):
            axes.step(at, known, where="post", color="#333333", linestyle=style, linewidth=1.2, label=label)
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
