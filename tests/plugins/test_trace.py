"""The listener ``trace``: what its files say about a step, against the model's own course and against brute force."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity import Block, Net, adam, draw, on_ranks, seeded, sharded_copy, square_step, units_of
from polyshard.errors import ConfigError
from polyshard.interfaces import Clock, Observer, PluginContext, UnitEvent, UnitOperation, UnitSpec
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.trace import (
    Lane,
    MemorySample,
    Recording,
    Span,
    StepTrace,
    Trace,
    draw_trace,
    read_trace,
    write_trace,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

CPU = torch.device("cpu")
UNITS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]


def spec(name: str, numel: int = 16, dtype: torch.dtype = torch.float32) -> UnitSpec:
    return UnitSpec(
        name=name,
        module_class=nn.Linear,
        parameter_names=(f"{name}.weight",),
        numel=numel,
        shard_numel=numel // 2,
        master_dtype=dtype,
        device=CPU,
        is_root=not name,
    )


def listener(folder: Path, **options: Any) -> Trace:
    return Trace(PluginContext("trace", CPU), folder, **options)


def span(lane: Lane, start: float, end: float, unit: str = "blocks.0", **changed: Any) -> Span:
    return dataclasses.replace(
        Span(lane=lane, unit=unit, start_us=start, end_us=end, backward=False, nbytes=64, dtype="float32"), **changed
    )


def step_of(*spans: Span, duration: float = 100.0, memory: tuple[MemorySample, ...] = ()) -> StepTrace:
    return StepTrace(step=3, rank=0, device="cpu", duration_us=duration, spans=spans, memory=memory)


def test_what_did_not_finish_counts_as_no_time() -> None:
    trace = step_of(
        span(Lane.GATHER, 10, 100, finished=False),
        span(Lane.REDUCE, 20, 30),
        span(Lane.COMPUTE, 0, 100, finished=False),
        span(Lane.COMPUTE, 25, 28),
        span(Lane.WAIT, 26, 100, finished=False),
    )
    assert trace.exposed == [(20, 25), (28, 30)]


SPANS = st.lists(
    st.tuples(st.sampled_from(list(Lane)), st.integers(0, 25), st.integers(0, 10), st.sampled_from(UNITS)).map(
        lambda drawn: span(drawn[0], drawn[1], drawn[1] + drawn[2], unit=drawn[3])
    ),
    max_size=12,
)


@pytest.mark.slow
@given(SPANS)
def test_exposure_equals_a_count_over_a_grid(spans: list[Span]) -> None:
    count = 0
    for n in range(40):
        there = {each.lane for each in spans if each.start_us <= n < each.end_us}
        computes = Lane.COMPUTE in there and Lane.WAIT not in there
        count += bool(there & {Lane.GATHER, Lane.REDUCE}) and not computes
    assert step_of(*spans, duration=40.0).exposed_us == count


def crowded() -> StepTrace:
    return step_of(
        span(Lane.COMPUTE, 0, 100, unit="(root)"),
        span(Lane.GATHER, 1.5, 30.125),
        span(Lane.GATHER, 20, 40, unit="blocks.1", dtype="bfloat16", nbytes=32),
        span(Lane.WAIT, 25, 30.125),
        span(Lane.COMPUTE, 30.125, 60),
        span(Lane.COMPUTE, 70, 90, backward=True),
        span(Lane.REDUCE, 90, 99.999),
        span(Lane.REDUCE, 95, 100, unit="blocks.1", finished=False),
        memory=(
            MemorySample(0.0, 0, 1000, 4096),
            MemorySample(30.0, 96, 1500, 4096),
            MemorySample(100.0, 0, 1100, 8192),
        ),
    )


@pytest.mark.slow
@given(SPANS)
def test_any_spans_are_a_chrome_trace_and_read_back(spans: list[Span]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        write_trace(step_of(*spans), path)
        assert_chrome_trace(json.loads(path.read_text()))
        assert read_trace(path) == step_of(*spans)
        over = step_of(*(dataclasses.replace(each, over="edp and dp_replicate") for each in spans))
        write_trace(over, path)
        assert read_trace(path) == over


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    trace = crowded()
    write_trace(trace, tmp_path / "step.json")
    assert read_trace(tmp_path / "step.json") == trace
    content = json.loads((tmp_path / "step.json").read_text())
    assert_chrome_trace(content)
    events = content["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    # Two gathers overlap without one holding the other, and so do two reductions.
    assert sorted(tracks.values()) == [
        "compute", "exposed communication", "gather", "gather (2)", "reduce", "reduce (2)", "step", "wait",
    ]  # fmt: skip
    gathers = {e["name"]: e for e in events if e["ph"] == "X" and e["cat"] == "gather"}
    assert (gathers["blocks.0"]["ts"], gathers["blocks.0"]["dur"]) == (1.5, 28.625)
    assert gathers["blocks.1"]["args"]["bytes"] == 32
    assert gathers["blocks.1"]["args"]["dtype"] == "bfloat16"
    directions = [(e["name"], e["cat"]) for e in events if e["ph"] == "X" and tracks[e["tid"]] == "compute"]
    assert directions == [
        ("(root)", "compute,forward"),
        ("blocks.0", "compute,forward"),
        ("blocks.0", "compute,backward"),
    ]
    allocated = [(e["ts"], e["args"]) for e in events if e["name"] == "memory allocated"]
    assert allocated == [(0.0, {"bytes": 1000}), (30.0, {"bytes": 1500}), (100.0, {"bytes": 1100})]
    assert content["otherData"]["exposed_us"] == pytest.approx(trace.exposed_us)


def assert_chrome_trace(content: dict[str, Any]) -> None:
    """Everything that the format asks of complete, counter and metadata events, and that slices of a track nest."""
    assert content["displayTimeUnit"] in ("ms", "ns")
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event.get("args", {}), dict)
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0
                assert isinstance(event["cat"], str)
                slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
            case "C":
                assert event["args"]
                assert all(type(value) in (int, float) for value in event["args"].values())
                assert event["ts"] >= 0
            case "M":
                assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            case other:
                pytest.fail(f"unexpected phase {other!r}")
    for track in slices.values():
        for (a, b), (c, d) in itertools.combinations(track, 2):
            # A nanosecond of rounding aside.
            apart = b <= c + 1e-3 or d <= a + 1e-3
            nested = (a <= c + 1e-3 and d <= b + 1e-3) or (c <= a + 1e-3 and b <= d + 1e-3)
            assert apart or nested


NO_TRACE = r"other\.json is no step that the listener 'trace' wrote .*\.json files"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", NO_TRACE),
        ("[]", NO_TRACE),
        ('{"traceEvents": []}', NO_TRACE),
        ('{"traceEvents": [], "otherData": {}}', NO_TRACE),
        ('{"traceEvents": [], "otherData": {"polyshard_trace": 99}}', r"other\.json is a trace of format 99"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


@pytest.mark.slow
def test_pictures_are_drawn_in_the_format_of_their_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_trace(crowded(), tmp_path / "step.svg")
    svg = (tmp_path / "step.svg").read_text()
    assert svg.startswith("<?xml")
    # The root computes all the time, but for what it waits for a gather.
    assert crowded().exposed_us == pytest.approx(5.125)
    assert "0.10 ms, 0.01 ms of it exposed communication (5.1%)" in svg
    for word in ("gather", "forward", "backward", "reduce", "exposed", "allocated", "reserved", "blocks.0"):
        assert f"<!-- {word} -->" in svg
    draw_trace(crowded(), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def train(
    folder: Path | None,
    turns: int = 4,
    model: Callable[[], nn.Module] = Net,
    step: Callable[[nn.Module, int, int], Any] = square_step,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> list[list[torch.Tensor]]:
    """Losses, gradients of inputs and final shards, by rank, of a training over two ranks."""

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        listeners = [] if folder is None else [{"name": "trace", "folder": str(folder), "rank": rank, **options}]
        mine = sharded_copy(seeded(model), rank, world, policy=units_of(Block), listeners=listeners, **(settings or {}))
        optimizer = adam(mine)
        told = []
        for turn in range(turns):
            told += step(mine, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        return told + [parameter.detach().clone() for parameter in mine.parameters()]

    return on_ranks(2, on_rank)


def counts(trace: StepTrace) -> Counter[tuple[str, str, bool]]:
    """How often each unit did what, waits aside."""
    assert all(each.finished for each in trace.spans)
    return Counter((each.unit, each.lane.value, each.backward) for each in trace.spans if each.lane is not Lane.WAIT)


def expected_counts(gathers: int, root_gathers: int) -> Counter[tuple[str, str, bool]]:
    found: Counter[tuple[str, str, bool]] = Counter()
    for unit in UNITS:
        found[unit, "gather", False] = root_gathers if unit == "(root)" else gathers
        found[unit, "compute", False] = found[unit, "compute", True] = found[unit, "reduce", False] = 1
    return +found


@pytest.mark.parametrize(
    ("strategy", "gathers", "root_gathers"), [("full_shard", 2, 1), ("shard_grad_op", 1, 1), ("no_shard", 0, 0)]
)
def test_a_step_holds_each_units_operations(tmp_path: Path, strategy: str, gathers: int, root_gathers: int) -> None:
    train(tmp_path, settings={"strategy": strategy}, ranks="all", picture="none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3-rank-0.json", "step-3-rank-1.json"]
    for rank in range(2):
        trace = read_trace(tmp_path / f"step-3-rank-{rank}.json")
        assert (trace.step, trace.rank, trace.device) == (3, rank, "cpu")
        assert counts(trace) == expected_counts(gathers, root_gathers)
        assert all(0 <= each.start_us <= each.end_us <= trace.duration_us for each in trace.spans)
        assert 0.0 <= trace.exposed_share <= 1.0


@pytest.mark.slow
def test_a_step_is_in_order(tmp_path: Path) -> None:
    train(tmp_path, picture="none", settings={"batch_nbytes": 0})
    content = json.loads((tmp_path / "step-3-rank-0.json").read_text())
    assert_chrome_trace(content)
    trace = read_trace(tmp_path / "step-3-rank-0.json")
    for unit in UNITS:
        own = [each for each in trace.spans if each.unit == unit]
        gathers = [each for each in own if each.lane is Lane.GATHER]
        forward, backward = [each for each in own if each.lane is Lane.COMPUTE]
        (reduction,) = [each for each in own if each.lane is Lane.REDUCE]
        assert (forward.backward, backward.backward) == (False, True)
        assert gathers[0].end_us <= forward.start_us
        assert gathers[-1].end_us <= backward.start_us
        assert forward.end_us <= backward.start_us
        assert backward.end_us <= reduction.start_us
    blocks = [each for each in trace.of(Lane.COMPUTE) if each.unit != "(root)"]
    course = [(each.unit, each.backward) for each in blocks]
    assert course == [(f"blocks.{n}", False) for n in range(3)] + [(f"blocks.{n}", True) for n in (2, 1, 0)]
    assert all(before.end_us <= after.start_us for before, after in itertools.pairwise(blocks))
    # The root computes around its blocks.
    forward, backward = [each for each in trace.of(Lane.COMPUTE) if each.unit == "(root)"]
    assert forward.start_us <= blocks[0].start_us
    assert blocks[2].end_us <= forward.end_us
    assert backward.start_us <= blocks[3].start_us
    assert blocks[5].end_us <= backward.end_us
    # It waits for them, and that is no compute.
    waits = [each for each in trace.of(Lane.WAIT) if each.unit == "blocks.1"]
    gathers = [each for each in trace.of(Lane.GATHER) if each.unit == "blocks.1"]
    assert len(waits) >= len(gathers) == 2
    for wait, gather in zip(waits, gathers, strict=False):
        assert wait.start_us <= gather.end_us <= wait.end_us
        assert all(end <= wait.start_us or wait.end_us <= start for start, end in trace.compute)


@pytest.mark.slow
def test_bytes_and_gather_memory_are_those_of_the_units(tmp_path: Path) -> None:
    train(tmp_path, picture="none", settings={"forward_prefetch": 1, "backward_prefetch": 1, "batch_nbytes": 0})
    trace = read_trace(tmp_path / "step-3-rank-0.json")
    # up: 7 x 5 and 7; down: 5 x 7. Float64, and padded to the alignment of shards.
    elements = 7 * 5 + 7 + 5 * 7
    block = next(each for each in trace.spans if each.unit == "blocks.0")
    root = next(each for each in trace.spans if each.unit == "(root)")
    assert block.dtype == "float64"
    assert elements * 8 <= block.nbytes < (elements + 2 * 64) * 8
    # The root's, and those of the block that computes and of the next one.
    assert max(each.gathered for each in trace.memory) == root.nbytes + 2 * block.nbytes
    assert trace.memory[0] == MemorySample(0.0, 0)
    assert trace.memory[-1] == MemorySample(trace.duration_us, 0)
    assert [each.at_us for each in trace.memory] == sorted(each.at_us for each in trace.memory)


@pytest.mark.parametrize(
    ("steps", "expected"), [("first", [1]), ("every", [1, 2, 3, 4]), ([4, 2], [2, 4]), (1, [1]), (9, [])]
)
def test_the_steps_asked_for_are_written(tmp_path: Path, steps: Any, expected: list[int]) -> None:
    train(tmp_path / "made" / "for it", steps=steps, picture="none")
    found = sorted(int(path.name.split("-")[1]) for path in tmp_path.rglob("*.json"))
    assert found == expected


def test_only_the_ranks_asked_for_watch(tmp_path: Path) -> None:
    assert listener(tmp_path, rank=1).make_observer(spec("a")) is None
    assert callable(listener(tmp_path, rank=1, ranks=[1, 3]).make_observer(spec("a")))
    assert callable(listener(tmp_path).make_observer(spec("a")))

    class Group:
        def rank(self) -> int:
            return 3

        def size(self) -> int:
            return 4

    watches = Trace(PluginContext("trace", CPU, process_group=Group()), tmp_path, ranks=3)
    assert callable(watches.make_observer(spec("a")))


@pytest.mark.slow
def test_a_picture_lies_beside_the_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    train(tmp_path)
    train(tmp_path, steps=[2], picture="svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-2-rank-0.json", "step-2-rank-0.svg", "step-3-rank-0.json", "step-3-rank-0.png",
    ]  # fmt: skip


@pytest.mark.slow
def test_recomputed_units_are_gathered_once_and_compute_twice_in_backward(tmp_path: Path) -> None:
    class Recomputing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.last(x)

    train(tmp_path, model=Recomputing, picture="none")
    trace = read_trace(tmp_path / "step-3-rank-0.json")
    for unit in UNITS[1:]:
        backward = [each for each in trace.of(Lane.COMPUTE) if each.unit == unit and each.backward]
        assert len(backward) == 2
        assert sum(each.unit == unit for each in trace.of(Lane.GATHER)) == 2
        # The recomputation lies inside the backward.
        outer, inner = backward
        assert outer.start_us <= inner.start_us
        assert inner.end_us <= outer.end_us


def test_a_forward_without_backward_is_a_step(tmp_path: Path) -> None:
    def evaluate(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(draw(4, 3, turn=turn, rank=rank))]

    train(tmp_path, step=evaluate, steps=[2], picture="none")
    found = counts(read_trace(tmp_path / "step-2-rank-0.json"))
    assert found == Counter({(unit, lane, False): 1 for unit in UNITS for lane in ("gather", "compute")})


def test_a_step_that_failed_is_written_with_what_it_began(tmp_path: Path) -> None:
    class Failing(Net):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.first(x))
            if self.fails:
                raise ZeroDivisionError("between two blocks")
            return self.last(self.blocks[2](self.blocks[1](x)))

    def fails_once(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        assert isinstance(model, Failing)
        model.fails = turn == 1
        if turn == 1:
            with pytest.raises(ZeroDivisionError):
                square_step(model, turn, rank)
            return []
        return square_step(model, turn, rank)

    train(tmp_path, model=Failing, step=fails_once, steps=[2, 3], picture="none")
    failed = read_trace(tmp_path / "step-2-rank-0.json")
    done = {each.unit for each in failed.of(Lane.COMPUTE) if each.finished}
    assert "blocks.0" in done
    assert not any(each.unit in ("blocks.1", "blocks.2") for each in failed.of(Lane.COMPUTE))
    assert not failed.of(Lane.REDUCE)
    assert counts(read_trace(tmp_path / "step-3-rank-0.json")) == expected_counts(2, 1)


GATHER, COMPUTE, WAIT, REDUCE, RELEASE = UnitOperation


def call_all(watches: Observer, unit: UnitSpec) -> None:
    for operation, backward in ((GATHER, False), (WAIT, False), (COMPUTE, False), (COMPUTE, True)):
        watches(UnitEvent(operation, unit, backward=backward))
        watches(UnitEvent(operation, unit, begins=False, backward=backward))
    watches(UnitEvent(RELEASE, unit))
    watches(UnitEvent(REDUCE, unit))
    watches(UnitEvent(REDUCE, unit, begins=False))


class LateClock(Clock):
    """Stamps are numbers of marks, and the device has got to those below ``reached``; ten microseconds apart."""

    def __init__(self) -> None:
        self.taken = 0
        self.reached = 0

    def stamp(self) -> int:
        self.taken += 1
        return self.taken

    def passed(self, stamp: int) -> bool:
        return stamp <= self.reached

    def wait(self, stamp: int) -> None:
        self.reached = max(self.reached, stamp)

    def microseconds(self, first: int, then: int) -> float:
        assert max(first, then) <= self.reached, "read before the device got there"
        return 10.0 * (then - first)

    def memory(self) -> tuple[int, int]:
        return 1000 + self.taken, 4096


def late_listener(folder: Path, **options: Any) -> tuple[Trace, LateClock, Observer]:
    trace = listener(folder, picture="none", **options)
    clock = LateClock()
    trace._clock = clock
    watches = trace.make_observer(spec("a"))
    assert watches is not None
    return trace, clock, watches


def one_step(trace: Trace, watches: Observer) -> None:
    trace.step_begin()
    call_all(watches, spec("blocks.0"))
    trace.step_end()


def test_files_are_written_at_the_first_step_begin_behind_the_device(tmp_path: Path) -> None:
    trace, clock, watches = late_listener(tmp_path, steps=[1])
    one_step(trace, watches)
    assert clock.taken == 13  # begin, eleven calls, end
    one_step(trace, watches)
    clock.reached = 12
    one_step(trace, watches)
    assert not list(tmp_path.iterdir())
    clock.reached = 13
    trace.step_begin()
    written = read_trace(tmp_path / "step-1-rank-0.json")
    assert clock.taken == 13
    assert written.duration_us == 120.0
    assert [(each.lane.value, *each.interval) for each in written.spans] == [
        ("gather", 10.0, 20.0),
        ("wait", 30.0, 40.0),
        ("compute", 50.0, 60.0),
        ("compute", 70.0, 80.0),
        ("reduce", 100.0, 110.0),
    ]
    # At the begin, of compute (five calls), and at the end.
    assert [each.at_us for each in written.memory] == [0.0, 50.0, 60.0, 70.0, 80.0, 90.0, 120.0]
    assert [each.gathered for each in written.memory] == [0, 64, 64, 64, 64, 0, 0]
    assert [each.allocated for each in written.memory] == [1001, 1006, 1007, 1008, 1009, 1010, 1013]


@pytest.mark.parametrize("how", ["flush", "close", "on_save"])
def test_flush_close_and_a_checkpoint_wait_and_write(tmp_path: Path, how: str) -> None:
    trace, clock, watches = late_listener(tmp_path, steps=[1, 2, 3])
    one_step(trace, watches)
    one_step(trace, watches)
    assert clock.reached == 0
    getattr(trace, how)()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1-rank-0.json", "step-2-rank-0.json"]
    one_step(trace, watches)
    trace.flush()
    assert (tmp_path / "step-3-rank-0.json").exists() == (how != "close")


def test_close_in_the_middle_of_a_step_writes_what_there_is(tmp_path: Path) -> None:
    trace, _, watches = late_listener(tmp_path, steps="every")
    trace.step_begin()
    watches(UnitEvent(COMPUTE, spec("blocks.0")))
    trace.close()
    written = read_trace(tmp_path / "step-1-rank-0.json")
    assert [(each.finished, *each.interval) for each in written.spans] == [(False, 10.0, 20.0)]
    trace.step_end()


def test_operations_that_overlap_are_paired_by_unit_and_in_order(tmp_path: Path) -> None:
    clock = LateClock()
    recording = Recording(1, 0, CPU, clock)
    first, second = spec("blocks.0"), spec("blocks.1")
    for operation, unit, begins in [
        (GATHER, first, False),  # of one that began before
        (REDUCE, first, True),
        (REDUCE, second, True),
        (REDUCE, first, True),
        (REDUCE, first, False),
        (REDUCE, second, False),
        (REDUCE, first, False),
        (GATHER, second, True),
    ]:
        recording.mark(UnitEvent(operation, unit, begins))
    recording.end()
    recording.wait()
    spans = recording.trace().spans
    assert [(each.unit, *each.interval, each.finished) for each in spans] == [
        ("blocks.0", 20.0, 50.0, True),
        ("blocks.1", 30.0, 60.0, True),
        ("blocks.0", 40.0, 70.0, True),
        ("blocks.1", 80.0, 90.0, False),
    ]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "folder"
    trace, _, watches = late_listener(blocked, steps=[1])
    blocked.write_text("in the way")
    one_step(trace, watches)
    with pytest.warns(UserWarning, match=r"Step 1 was traced, but .*step-1-rank-0 cannot be written: FileExistsError"):
        trace.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(trace, watches)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib is not installed\. Install polyshard\[train\], or set picture"):
        listener(tmp_path)
    listener(tmp_path, picture="none")
    # Ranks that draw nothing need none.
    listener(tmp_path, rank=1)
