"""Traced steps as files in Chrome's trace format, which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polyshard.errors import ConfigError

from .trace_step import Lane, MemorySample, Span, StepTrace, rows

#: Version of what ``write_trace`` writes beside the format's own fields.
FORMAT = 1

_STEP_TRACK = 0
_EXPOSED_TRACK = 1
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
    """What ``write_trace`` wrote to ``path``.

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
                yield _span_event(pid, track, span, numbers[id(span)])
    for sample in trace.memory:
        yield _counter(pid, "gather buffers", sample.at_us, sample.gathered)
        if sample.allocated is not None:
            yield _counter(pid, "memory allocated", sample.at_us, sample.allocated)
        if sample.reserved is not None:
            yield _counter(pid, "memory reserved", sample.at_us, sample.reserved)


def _span_event(pid: int, track: int, span: Span, number: int) -> dict[str, Any]:
    category = span.lane.value
    if span.lane is Lane.COMPUTE:
        category = "compute,backward" if span.backward else "compute,forward"
    arguments = {
        "number": number,
        "lane": span.lane.value,
        "backward": span.backward,
        "bytes": span.nbytes,
        "dtype": span.dtype,
        "finished": span.finished,
    }
    return _complete(pid, track, span.unit, category, span.start_us, span.end_us, arguments)


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


def _counter(pid: int, name: str, at: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "tid": _STEP_TRACK, "name": name, "ts": _nearest(at), "args": {"bytes": nbytes}}


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
        )
        numbered.append((int(arguments["number"]), span))
    return [span for _, span in sorted(numbered, key=lambda each: each[0])]


def _samples(events: Iterable[dict[str, Any]]) -> Iterator[MemorySample]:
    curves: dict[str, list[tuple[float, int]]] = {"gather buffers": [], "memory allocated": [], "memory reserved": []}
    for event in events:
        if event["ph"] == "C":
            curves[event["name"]].append((float(event["ts"]), int(event["args"]["bytes"])))
    gathered, allocated, reserved = curves.values()
    for position, (at, nbytes) in enumerate(gathered):
        if allocated:
            yield MemorySample(at, nbytes, allocated[position][1], reserved[position][1])
        else:
            yield MemorySample(at, nbytes)
