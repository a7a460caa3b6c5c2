"""The listener ``trace`` on CUDA: times of the device, without waiting for it. The CPU twin is ``test_trace``."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import local
from polyshard.interfaces import PluginContext
from polyshard_plugins.trace import Lane, StepTrace, Trace, read_trace
from torch import nn

pytestmark = pytest.mark.gpu

WIDTH = 512
UNITS = ["(root)", "blocks.0", "blocks.1", "blocks.2"]
#: Half a second and more, far longer than the host needs for a step.
CYCLES_OF_DELAY = 1_000_000_000
#: Microseconds by which two events may differ that one stream reaches at once.
RESOLUTION = 10.0
PICTURE = "none" if importlib.util.find_spec("matplotlib") is None else "png"


class Block(nn.Module):
    delay = 0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.delay:
            torch.cuda._sleep(self.delay)
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def pretended(folder: Path | None, trace: Trace | None = None, **options: Any) -> Net:
    """The model as one pretended rank of four: all streams of the engine, and no other process."""
    torch.manual_seed(0)
    model = Net().to(cuda())
    listeners: list[Any] = [] if folder is None else [{"name": "trace", "folder": str(folder), **options}]
    config = polyshard.ShardConfig(
        collectives={"name": "fake", "world_size": 4},
        policy={"name": "module_class", "classes": [Block]},
        listeners=listeners if trace is None else [trace],
    )
    polyshard.shard(model, config)
    return model


def step(model: nn.Module, turn: int = 0) -> torch.Tensor:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(turn)).to(cuda())
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, turns: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    losses = []
    for turn in range(turns):
        losses.append(step(model, turn))
        optimizer.step()
        optimizer.zero_grad()
    return losses + [local(parameter.detach()).clone() for parameter in model.parameters()]


def assert_operations(trace: StepTrace) -> None:
    """Each unit gathers for forward and backward, the root once; and in order."""
    assert all(each.finished for each in trace.spans)
    found = Counter((each.unit, each.lane, each.backward) for each in trace.spans)
    for unit in UNITS:
        assert found[unit, Lane.GATHER, False] == (1 if unit == "(root)" else 2)
        assert found[unit, Lane.COMPUTE, False] == found[unit, Lane.COMPUTE, True] == 1
        assert found[unit, Lane.REDUCE, False] == 1
        own = [each for each in trace.spans if each.unit == unit]
        gathers = [each for each in own if each.lane is Lane.GATHER]
        forward, backward = [each for each in own if each.lane is Lane.COMPUTE]
        (reduction,) = [each for each in own if each.lane is Lane.REDUCE]
        assert gathers[0].end_us <= forward.start_us + RESOLUTION
        assert gathers[-1].end_us <= backward.start_us + RESOLUTION
        assert forward.end_us <= backward.start_us + RESOLUTION
        assert backward.end_us <= reduction.start_us + RESOLUTION
        assert gathers[0].nbytes >= (2 * 4 * WIDTH * WIDTH + 4 * WIDTH if unit != "(root)" else WIDTH * WIDTH) * 4
        waits = [each for each in own if each.lane is Lane.WAIT]
        # For each gather, and for room for the reduction.
        assert len(waits) == len(gathers) + 1
        assert gathers[0].end_us <= waits[0].end_us + RESOLUTION
        assert waits[0].end_us <= forward.start_us + RESOLUTION
    for each in trace.spans:
        assert -RESOLUTION <= each.start_us <= each.end_us <= trace.duration_us + RESOLUTION
    assert 0.0 <= trace.exposed_share <= 1.0


def assert_memory(trace: StepTrace) -> None:
    times = [each.at_us for each in trace.memory]
    assert times == sorted(times)
    block = max(each.nbytes for each in trace.spans if each.unit != "(root)")
    for each in trace.memory:
        assert each.allocated is not None
        assert each.reserved is not None
        assert 0 < each.allocated <= each.reserved
        # Gather buffers are part of what is allocated.
        assert each.gathered <= each.allocated
    assert max(each.gathered for each in trace.memory) >= 2 * block


def test_a_step_holds_each_units_operations_in_the_order_of_the_device(tmp_path: Path) -> None:
    train(pretended(tmp_path, picture=PICTURE))
    trace = read_trace(tmp_path / "step-3-rank-0.json")
    assert trace.device == str(cuda())
    assert_operations(trace)
    assert_memory(trace)
    if PICTURE != "none":
        assert (tmp_path / "step-3-rank-0.png").read_bytes().startswith(b"\x89PNG")
    # One stream for each lane: nothing overlaps within one, so that each has one track.
    content = json.loads((tmp_path / "step-3-rank-0.json").read_text())
    tracks = {each["args"]["name"] for each in content["traceEvents"] if each["name"] == "thread_name"}
    # Reductions of one launch begin and end together, and backwards of neighbouring units may overlap by the resolution
    # of events. What overlaps gets a track of its own.
    assert {track.partition(" (")[0] for track in tracks} == {
        "step",
        "exposed communication",
        "gather",
        "compute",
        "wait",
        "reduce",
    }


def test_times_are_the_devices_and_nothing_waits_for_them(tmp_path: Path) -> None:
    trace = Trace(PluginContext("trace", cuda()), tmp_path, steps=[3], picture="none")
    model = pretended(None, trace)
    inputs = [torch.randn(64, WIDTH, device=cuda()) for _ in range(6)]
    slow = model.blocks[1]
    for x in inputs[:2]:
        model(x).square().mean().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # that it does not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        slow.delay = CYCLES_OF_DELAY
        model(inputs[2]).square().mean().backward()
        slow.delay = 0
        # The device is still in the middle of the traced step: this step's begin finds nothing to write.
        model(inputs[3]).square().mean().backward()
        assert not torch.cuda.current_stream().query()
        assert not list(tmp_path.iterdir())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    model(inputs[4]).square().mean().backward()
    written = read_trace(tmp_path / "step-3-rank-0.json")
    assert_operations(written)
    forwards = {each.unit: each.end_us - each.start_us for each in written.of(Lane.COMPUTE) if not each.backward}
    # At two gigahertz and less.
    assert forwards["blocks.1"] >= 1e6 * CYCLES_OF_DELAY / 2.1e9
    assert forwards["blocks.1"] > 10 * max(forwards["blocks.0"], forwards["blocks.2"])
    assert forwards["(root)"] >= forwards["blocks.1"]
    assert written.duration_us >= forwards["(root)"]


def test_flush_waits_for_the_device(tmp_path: Path) -> None:
    trace = Trace(PluginContext("trace", cuda()), tmp_path, steps=[2], picture="none")
    model = pretended(None, trace)
    step(model)
    torch.cuda.synchronize()
    model.blocks[2].delay = CYCLES_OF_DELAY
    step(model)
    trace.flush()
    assert_operations(read_trace(tmp_path / "step-2-rank-0.json"))


def test_a_capture_is_not_disturbed_by_steps_that_wait_to_be_written(tmp_path: Path) -> None:
    trace = Trace(PluginContext("trace", cuda()), tmp_path, steps="every", picture="none")
    model = pretended(None, trace)
    step(model)
    x = torch.zeros(8, device=cuda())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            trace.step_begin()
            x.add_(1)
            trace.step_end()

    with pytest.warns(UserWarning, match=r"Step 2 is captured in a CUDA graph and not traced"):
        capture()
    graph.replay()
    graph.replay()
    assert x.tolist() == [2.0] * 8
    trace.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1-rank-0.json"]
