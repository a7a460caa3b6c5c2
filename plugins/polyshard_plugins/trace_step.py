"""One traced step: how much of its communication is exposed, its file in Chrome's trace format, and its picture."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyshard.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Begin and end, in microseconds. A set of times is a sorted list of intervals that do not touch.
Interval = tuple[float, float]


class Lane(enum.StrEnum):
    """The kind of operation that a span is."""

    GATHER = "gather"
    COMPUTE = "compute"
    WAIT = "wait"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Span:
    """One gather, forward, backward or reduction of one unit, or one time in which the stream that computes waits."""

    lane: Lane
    unit: str
    """Fully-qualified name of the unit's module; ``(root)`` for the outermost. Of a wait: the unit whose gather,
    or whose reduction's memory, is waited for."""
    start_us: float
    end_us: float
    """Begin and end, in microseconds from the step's begin."""
    backward: bool
    """Of compute: whether it is the unit's backward, or a forward that is repeated in one. False of other lanes."""
    nbytes: int
    """Bytes of the whole unit, padding included, in ``dtype``."""
    dtype: str
    """The dtype of the unit's parameters as the user made them, such as ``float32``; what travels may be narrower."""
    finished: bool = True
    """Whether its end was seen. One that is not finished ends with the step, and counts as no time."""
    over: str = ""
    """The dimensions of the mesh that the unit is cut and replicated over; empty where they have no names."""

    @property
    def interval(self) -> Interval:
        return self.start_us, self.end_us


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory taken when the host had issued everything up to one point of the step."""

    at_us: float
    """Microseconds from the step's begin."""
    gathered: int
    """Bytes of the gather buffers alive, in the dtypes in which the user made the parameters."""
    allocated: int | None = None
    """Bytes of all tensors on the device, from its caching allocator. None on the CPU."""
    reserved: int | None = None
    """Bytes that the caching allocator holds. None on the CPU."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The operations of one rank's units in one step: an outermost forward, and all until its backward has ended."""

    step: int
    """Number of the step, from 1."""
    rank: int
    device: str
    duration_us: float
    """Microseconds from the begin of the forward to the end of the backward; on a CUDA device, of device time."""
    spans: tuple[Span, ...]
    """In the order in which they were issued."""
    memory: tuple[MemorySample, ...]
    """In the order of time."""

    def of(self, lane: Lane) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.lane is lane)

    @property
    def communication(self) -> list[Interval]:
        """When a gather or a reduction runs."""
        return union(self._finished(Lane.GATHER, Lane.REDUCE))

    @property
    def compute(self) -> list[Interval]:
        """When a unit computes, and does not wait."""
        return without(self._finished(Lane.COMPUTE), self._finished(Lane.WAIT))

    @property
    def exposed(self) -> list[Interval]:
        """When communication runs and no unit computes."""
        return without(self.communication, self.compute)

    @property
    def exposed_us(self) -> float:
        """Microseconds in which communication runs and no unit computes."""
        return length(self.exposed)

    @property
    def exposed_share(self) -> float:
        return self.exposed_us / self.duration_us if self.duration_us > 0 else 0.0

    def _finished(self, *streams: Lane) -> list[Interval]:
        return [span.interval for span in self.spans if span.finished and span.lane in streams]


def rows(spans: Iterable[Span]) -> list[list[Span]]:
    """``spans`` in rows, such that two of one row are apart or one holds the other.

    Viewers draw nothing else in one row. Operations of one stream need one row; on the host, several are under way.
    """
    made: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, -span.end_us)):
        for still_open in open_spans:
            while still_open and still_open[-1].end_us <= span.start_us:
                still_open.pop()
        fitting = (row for row, above in enumerate(open_spans) if not above or span.end_us <= above[-1].end_us)
        row = next(fitting, len(made))
        if row == len(made):
            made.append([])
            open_spans.append([])
        made[row].append(span)
        open_spans[row].append(span)
    return made


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in at least one of ``intervals``; empty and reversed ones hold no time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(kept: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    holes = union(removed)
    rest: list[Interval] = []
    first = 0
    for start, end in union(kept):
        # Holes before this interval are before all that follow, too.
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        cursor = start
        for hole_start, hole_end in holes[first:]:
            if hole_start >= end:
                break
            if hole_start > cursor:
                rest.append((cursor, hole_start))
            cursor = max(cursor, hole_end)
        if cursor < end:
            rest.append((cursor, end))
    return rest


def length(intervals: Iterable[Interval]) -> float:
    """The time that ``intervals`` cover; times that two of them share count once."""
    return sum(end - start for start, end in union(intervals))


#: Version of the fields that ``write_trace`` adds to Chrome's.
FORMAT = 1

_STEP_TRACK = 0
_EXPOSED_TRACK = 1
_COUNTERS = ("gather buffers", "memory allocated", "memory reserved")
_FIRST_TRACK = {Lane.GATHER: 100, Lane.COMPUTE: 200, Lane.WAIT: 300, Lane.REDUCE: 400}


def write_trace(trace: StepTrace, path: str | Path) -> None:
    """Write ``trace`` to the file ``path``; times are in microseconds from the step's begin, to the nanosecond."""
    content = {
        "traceEvents": list(_events(trace)),
        "displayTimeUnit": "ms",
        "otherData": {
            "polyshard_trace": FORMAT,
            "step": trace.step,
            "rank": trace.rank,
            "device": trace.device,
            "duration_us": _nearest(trace.duration_us),
            "exposed_us": _nearest(trace.exposed_us),
            "exposed_share": trace.exposed_share,
        },
    }
    Path(path).write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")


def read_trace(path: str | Path) -> StepTrace:
    """The step that ``write_trace`` wrote to ``path``.

    Raises ``ConfigError`` for a file with anything else in it, and ``OSError`` where it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        content = json.loads(text)
        about, events = content["otherData"], content["traceEvents"]
        if about["polyshard_trace"] != FORMAT:
            raise ConfigError(
                f"{path} is a trace of format {about['polyshard_trace']!r}, and this version reads {FORMAT}. Read it "
                "with the version that wrote it, or record the step again."
            )
        return StepTrace(
            step=int(about["step"]),
            rank=int(about["rank"]),
            device=str(about["device"]),
            duration_us=float(about["duration_us"]),
            spans=tuple(_spans(events)),
            memory=tuple(_samples(events)),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} is no step that the listener 'trace' wrote ({type(error).__name__}: {error}). Give one of the "
            ".json files in its folder."
        ) from error


def _events(trace: StepTrace) -> Iterator[dict[str, Any]]:
    pid = trace.rank
    yield _named("process_name", pid, _STEP_TRACK, f"rank {trace.rank} on {trace.device}")
    yield from _track(pid, _STEP_TRACK, "step")
    yield _complete(pid, _STEP_TRACK, f"step {trace.step}", "step", 0.0, trace.duration_us, {})
    yield from _track(pid, _EXPOSED_TRACK, "exposed communication")
    for start, end in trace.exposed:
        yield _complete(pid, _EXPOSED_TRACK, "exposed", "exposed", start, end, {})
    # Spans are numbered as they were issued, so that reading gives that order back.
    numbers = {id(span): number for number, span in enumerate(trace.spans)}
    for lane in Lane:
        for row, spans in enumerate(rows(trace.of(lane))):
            track = _FIRST_TRACK[lane] + row
            yield from _track(pid, track, lane.value if row == 0 else f"{lane.value} ({row + 1})")
            for span in spans:
                direction = ("," + ("backward" if span.backward else "forward")) if lane is Lane.COMPUTE else ""
                arguments = {
                    "number": numbers[id(span)],
                    "lane": lane.value,
                    "backward": span.backward,
                    "bytes": span.nbytes,
                    "dtype": span.dtype,
                    **({"over": span.over} if span.over else {}),
                    "finished": span.finished,
                }
                category = f"{lane.value}{direction}"
                yield _complete(pid, track, span.unit, category, span.start_us, span.end_us, arguments)
    for sample in trace.memory:
        for name, nbytes in zip(_COUNTERS, (sample.gathered, sample.allocated, sample.reserved), strict=True):
            if nbytes is not None:
                at = _nearest(sample.at_us)
                yield {"ph": "C", "pid": pid, "tid": _STEP_TRACK, "name": name, "ts": at, "args": {"bytes": nbytes}}


def _complete(
    pid: int, track: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": pid,
        "tid": track,
        "name": name,
        "cat": category,
        "ts": _nearest(start),
        "dur": _nearest(end - start),
        "args": arguments,
    }


def _track(pid: int, track: int, name: str) -> Iterator[dict[str, Any]]:
    yield _named("thread_name", pid, track, name)
    yield {"ph": "M", "pid": pid, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _named(what: str, pid: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": track, "name": what, "args": {"name": name}}


def _nearest(microseconds: float) -> float:
    return round(microseconds, 3)


def _spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    numbered = []
    for event in events:
        if event["ph"] != "X" or "lane" not in event["args"]:
            continue
        arguments = event["args"]
        span = Span(
            lane=Lane(arguments["lane"]),
            unit=str(event["name"]),
            start_us=float(event["ts"]),
            end_us=_nearest(float(event["ts"]) + float(event["dur"])),
            backward=bool(arguments["backward"]),
            nbytes=int(arguments["bytes"]),
            dtype=str(arguments["dtype"]),
            finished=bool(arguments["finished"]),
            over=str(arguments.get("over", "")),
        )
        numbered.append((int(arguments["number"]), span))
    return [span for _, span in sorted(numbered, key=lambda each: each[0])]


def _samples(events: Iterable[dict[str, Any]]) -> Iterator[MemorySample]:
    curves: dict[str, list[tuple[float, int]]] = {name: [] for name in _COUNTERS}
    for event in events:
        if event["ph"] == "C":
            curves[event["name"]].append((float(event["ts"]), int(event["args"]["bytes"])))
    gathered, allocated, reserved = curves.values()
    for position, (at, nbytes) in enumerate(gathered):
        device = (allocated[position][1], reserved[position][1]) if allocated else ()
        yield MemorySample(at, nbytes, *device)


_GATHER, _FORWARD, _BACKWARD, _REDUCE, _EXPOSED = "#1d4ed8", "#15803d", "#b45309", "#7e22ce", "#dc2626"
#: Of forward and of backward.
_LANES = {Lane.REDUCE: (_REDUCE, _REDUCE), Lane.COMPUTE: (_FORWARD, _BACKWARD), Lane.GATHER: (_GATHER, _GATHER)}
_LEGEND = {
    "gather": _GATHER, "forward": _FORWARD, "backward": _BACKWARD, "reduce": _REDUCE, "exposed": _EXPOSED,
}  # fmt: skip
#: Of compute: units inside of a module lie over it, and come out darker.
_OPACITY = 0.6
#: From the bottom to the top.
_ROWS = ("exposed", *_LANES)
#: Width of one letter, as a share of the step's.
_LETTER = 0.0075
_MIB = 1 << 20


def draw_trace(trace: StepTrace, path: str | Path) -> None:
    """Draw ``trace`` into the file ``path``, as PNG, SVG or PDF by its ending.

    Raises ``ImportError`` without matplotlib.
    """
    # Not pyplot: that keeps figures, and picks a window system where there may be none.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _draw_lanes(lanes, trace)
    _draw_memory(memory, trace)
    memory.set_xlabel("ms from the begin of the step")
    memory.set_xlim(0, trace.duration_us / 1000 or 1)
    title = (
        f"Step {trace.step}, rank {trace.rank} on {trace.device}: {trace.duration_us / 1000:.2f} ms, "
        f"{trace.exposed_us / 1000:.2f} ms of it exposed communication ({trace.exposed_share:.1%})"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)


def _draw_lanes(axes: Axes, trace: StepTrace) -> None:
    finished = [span for span in trace.spans if span.finished]
    waits = [span.interval for span in finished if span.lane is Lane.WAIT]
    for lane, (forward, backward) in _LANES.items():
        stacked = rows(span for span in finished if span.lane is lane)
        for number, spans in enumerate(stacked):
            # One of the equal parts of the lane's row, from the top.
            height = 0.8 / len(stacked)
            across = _ROWS.index(lane) + 0.4 - (number + 1) * height, height
            hidden = waits if lane is Lane.COMPUTE else []
            for turn, colour in ((False, forward), (True, backward)):
                same = (span.interval for span in spans if span.backward is turn)
                # One by one, each over those around it.
                own = [piece for interval in same for piece in without([interval], hidden)]
                _bars(axes, across, own, colour, _OPACITY if lane is Lane.COMPUTE else 1.0)
            _write_names(axes, across, spans, trace.duration_us)
    _bars(axes, (-0.4, 0.8), trace.exposed, _EXPOSED)
    for label, colour in _LEGEND.items():
        axes.broken_barh([], (0, 0), facecolor=colour, label=label)
    axes.set_yticks(range(len(_ROWS)), _ROWS)
    axes.set_ylim(-0.5, len(_ROWS) - 0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=5, frameon=False, fontsize=8)


def _bars(
    axes: Axes, across: tuple[float, float], intervals: list[Interval], colour: str, opacity: float = 1.0
) -> None:
    bars = [(start / 1000, (end - start) / 1000) for start, end in intervals]
    # Neighbours of one colour are told apart by a white edge, thin enough to leave something of short ones.
    axes.broken_barh(bars, across, facecolor=colour, alpha=opacity, edgecolor="white", linewidth=0.3)


def _write_names(axes: Axes, across: tuple[float, float], spans: list[Span], duration_us: float) -> None:
    """Each unit's name, or its last part, where that fits into the bar and no other bar lies in that."""
    for span in spans:
        start, end = span.interval
        if any(each is not span and start <= each.start_us and each.end_us <= end for each in spans):
            continue
        middle = ((start + end) / 2000, across[0] + across[1] / 2)
        for name in (span.unit, span.unit.rpartition(".")[2]):
            if len(name) * _LETTER < (end - start) / (duration_us or 1):
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
