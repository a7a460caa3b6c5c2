"""A plan, drawn: memory over the step, and what runs on which stream."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .memory import Kind
from .plan import Plan
from .recording import Part, Stream

_GIB = 2**30
_COLOURS = {
    Kind.PARAMETERS: "#4c72b0",
    Kind.OPTIMIZER: "#8172b3",
    Kind.GRADIENTS: "#55a868",
    Kind.BUFFERS: "#8c8c8c",
    Kind.ACTIVATIONS: "#ccb974",
    Kind.TEMPORARIES: "#dd8452",
    Kind.GATHERED: "#64b5cd",
    Kind.REDUCTION: "#c44e52",
}
_STREAMS = {Stream.COMPUTE: "#8c8c8c", Stream.GATHER: "#64b5cd", Stream.REDUCE: "#c44e52"}


def draw(plan: Plan, file: str | Path) -> None:
    """Write ``plan`` to ``file``, whose ending says how: ``.svg``, ``.png``, ``.pdf``.

    Memory of each kind lies on what stands throughout; below it are the streams where the step was timed.

    Raises:
        ConfigError: the plan has no batch, matplotlib is not installed, or it cannot write that.
    """
    if plan.timeline is None:
        raise ConfigError("A plan without a batch has no step to draw. Give --batch.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("Drawing needs matplotlib: install polyshard[docs], or leave out --picture.") from error
    # No pyplot: it would choose a window system, and keep figures.
    figure = Figure(figsize=(9, 5.5 if plan.time else 4), layout="constrained")
    above, *below = figure.subplots(
        2 if plan.time else 1, 1, sharex=bool(plan.time), height_ratios=(4, 1)[: 1 + bool(plan.time)], squeeze=False
    )[:, 0]
    positions = _draw_memory(above, plan)
    if below and plan.time is not None:
        _draw_streams(below[0], plan)
        below[0].set_xlabel("ms")
    else:
        above.set_xlabel("operations of the step, in order")
    peak = plan.timeline.peak
    x = positions[plan.timeline.moments.index(peak)]
    above.annotate(f"{peak.total / _GIB:.2f} GiB", (x, peak.total / _GIB), fontsize=8, ha="center", va="bottom")
    try:
        figure.savefig(str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {str(file)!r}: {error}") from error


def _draw_memory(axes: Any, plan: Plan) -> list[float]:
    """Stack the kinds; returns where each moment lies."""
    assert plan.timeline is not None
    moments = plan.timeline.moments
    positions = _positions(plan)
    kinds = [kind for kind in _COLOURS if plan.most[kind]]
    heights = [[moment.nbytes[kind] / _GIB for moment in moments] for kind in kinds]
    axes.stackplot(
        positions, heights, labels=[kind.value for kind in kinds], colors=[_COLOURS[k] for k in kinds], step="post"
    )
    if plan.memory_nbytes is not None and plan.memory_nbytes < 1.5 * plan.peak_nbytes:
        axes.axhline(plan.memory_nbytes / _GIB, color="black", linewidth=0.8, linestyle="--")
    for part in Part:
        first = next((x for x, moment in zip(positions, moments, strict=True) if moment.part is part), None)
        if first is not None and part is not Part.FORWARD:
            axes.axvline(first, color="black", linewidth=0.5, linestyle=":")
    axes.set_ylabel("GiB")
    axes.set_title(f"{plan.model}, rank 0 of {plan.world_size}", fontsize=10)
    axes.margins(x=0)
    axes.set_ylim(0, 1.12 * plan.peak_nbytes / _GIB)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return positions


def _positions(plan: Plan) -> list[float]:
    """Milliseconds at which each moment comes where the step was timed, else how much was issued before it."""
    assert plan.timeline is not None
    moments = plan.timeline.moments
    if plan.time is None:
        return [float(moment.position) for moment in moments]
    # What a moment follows is the last of compute's kernels that was issued before it.
    ends = [(index, each.end_s * 1e3) for index, each in plan.time.issued_at if each.stream is Stream.COMPUTE]
    order = [index for index, _ in ends]
    found = [bisect_right(order, moment.position - 1) for moment in moments]
    return [ends[each - 1][1] if each else 0.0 for each in found]


def _draw_streams(axes: Any, plan: Plan) -> None:
    assert plan.time is not None
    for row, stream in enumerate(Stream):
        bars = [
            (each.begin_s * 1e3, (each.end_s - each.begin_s) * 1e3)
            for _, each in plan.time.issued_at
            if each.stream is stream
        ]
        axes.broken_barh(bars, (-row - 0.4, 0.8), color=_STREAMS[stream], linewidth=0)
    axes.set_yticks([-row for row in range(len(Stream))], [stream.value for stream in Stream])
    axes.tick_params(axis="y", length=0)
