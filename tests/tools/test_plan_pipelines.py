"""Plans of pipelines, beside formulas, the order of torch's schedules, and what stages ask to be sent meanwhile."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from polyshard import ShardConfig
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext
from polyshard.pipelining import Gathers, PipelineStage
from polyshard.planning.meshes import WorldMesh
from polyshard_backends.fake import FakeCollectives
from polyshard_tools.forecast import (
    Kind,
    Link,
    LinkModel,
    Operation,
    Order,
    Pipeline,
    RankPlan,
    ShapedBatches,
    find_device,
    plan_pipeline,
)
from processes import KeptRanks
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

RANKS = KeptRanks()
WIDTH, ROWS, SHARING = 64, 8, 4
CPU = torch.device("cpu")
BATCH = ShapedBatches.parse(f"float32[{ROWS},{WIDTH}] scale=float32[{ROWS},1]")
SCHEDULES: dict[Order, Any] = {
    Order.GPIPE: ScheduleGPipe,
    Order.ONE_F_ONE_B: Schedule1F1B,
    Order.INTERLEAVED_1F1B: ScheduleInterleaved1F1B,
}
#: Elements of a block.
BLOCK = 2 * 4 * WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return mixed


class Stage(nn.Module):
    """Two blocks, and behind the last ones a head and the loss."""

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False) if number == stages - 1 else None

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or scale is None else (self.head(x) * scale).square().mean()


def on_meta(number: int, stages: int, kind: type[Stage] = Stage) -> nn.Module:
    with torch.device("meta"):
        return kind(number, stages)


class Several(Stage):
    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        return x, x


several = partial(on_meta, kind=Several)


def config_of(**settings: Any) -> ShardConfig:
    return ShardConfig(policy={"name": "module_class", "classes": [Block]}, **settings)


def planned(pipeline: Pipeline, **settings: Any) -> list[RankPlan]:
    """The plan of each rank along the pipeline."""
    found = plan_pipeline(config_of(**settings), on_meta, SHARING * pipeline.ranks, pipeline, batch=BATCH, samples=ROWS)
    by_rank = {rank: each for each in found.ranks for rank in each.ranks}
    return [by_rank[rank] for rank in range(pipeline.ranks)]


def ran(rank: int, pipeline: Pipeline) -> tuple[Counter[str], list[tuple[bool, int]]]:
    """What stages of a rank sent in a second step, and in which order torch's schedule runs them."""
    groups, stages = [], []
    for number in pipeline.numbers(rank):
        groups.append(FakeCollectives(PluginContext("fake", CPU), 0, SHARING))
        part = polyshard.shard(
            Stage(number, pipeline.stages), config_of(collectives=groups[-1], precision="bf16", check_ranks=False)
        )
        stages.append(PipelineStage(part, number, pipeline.stages, CPU, gathers=pipeline.gathers))

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output

    # The last stage computes its loss by itself, and gets the keywords, as the others do.
    schedule = SCHEDULES[pipeline.order](
        stages if pipeline.each > 1 else stages[0], pipeline.microbatches, loss_fn=loss_of
    )
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=0.0)
    rows = pipeline.microbatches * ROWS
    for _ in range(2):
        for group in groups:
            group.calls.clear()
        ends = pipeline.stages - 1 in pipeline.numbers(rank)
        schedule.step(
            *([torch.ones(rows, WIDTH)] if rank == 0 else []),
            target=torch.ones(rows) if ends else None,
            scale=torch.ones(rows, 1),
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
    sent = Counter[str]()
    for group in groups:
        for call in group.calls:
            sent[call.operation] += call.sent_nbytes
    actions = [re.fullmatch(r"(\d+)([FB])\d+", f"{each}") for each in schedule.pipeline_order[rank] if each is not None]
    order = [(each[2] == "F", int(each[1]) // pipeline.ranks) for each in actions if each]
    return sent, order


@pytest.mark.slow
@pytest.mark.parametrize("gathers", list(Gathers), ids=lambda each: each.value)
@pytest.mark.parametrize(
    ("order", "each"), [(Order.GPIPE, 1), (Order.ONE_F_ONE_B, 1), (Order.INTERLEAVED_1F1B, 2)], ids=str
)
def test_as_much_is_sent_in_the_order_of_a_schedule_as_stages_ask_for(
    order: Order, each: int, gathers: Gathers
) -> None:
    pipeline = Pipeline(order, 2, 4, each, gathers)
    found = planned(pipeline, precision="bf16")
    for rank, (sent, actions) in enumerate(RANKS.run(2, ran, pipeline)):
        message = Counter[str]()
        for row in found[rank].plan.traffic:
            if row.operation is not Operation.RECEIVE:
                message[row.operation.value] += row.received_nbytes
        assert message == sent, rank
        # Sums of all microbatches, in fp32.
        assert sent["reduce_scatter"] == 4 * (2 * each * BLOCK + rank * WIDTH * WIDTH) * (SHARING - 1) // SHARING
        assert list(pipeline.steps(rank)) == actions


@pytest.mark.slow
def test_activations_are_those_of_the_microbatches_in_flight() -> None:
    # fp32 of a microbatch: what lies between the blocks, the stage's output, and the wide one of either block.
    microbatch = 4 * ROWS * (2 * WIDTH + 2 * 4 * WIDTH)
    all_of_them, few = (planned(Pipeline(order, 4, 8))[1] for order in (Order.GPIPE, Order.ONE_F_ONE_B))
    assert (all_of_them.in_flight, few.in_flight) == (8, 3)
    kept = [each.plan.most[Kind.ACTIVATIONS] for each in (all_of_them, few)]
    assert kept[0] - kept[1] == (8 - 3) * microbatch
    for each in (all_of_them, few):
        # Activations from the stage before, and gradients of its own from the one behind.
        row = next(row for row in each.plan.traffic if row.operation is Operation.RECEIVE)
        assert (row.over, row.launches, row.received_nbytes) == ("pp", 16, 16 * 4 * ROWS * WIDTH)


@pytest.mark.slow
def test_whole_gradients_wait_in_the_dtype_of_reductions() -> None:
    # Both blocks, gathered in bf16 once a schedule, and the gradients of both in fp32.
    few = planned(Pipeline(Order.ONE_F_ONE_B, 4, 8), precision={"name": "bf16", "reduce": "fp32"})[1].plan
    assert few.most[Kind.GATHERED] == 2 * 2 * BLOCK
    assert few.most[Kind.REDUCTION] >= 4 * 2 * BLOCK
    one = planned(Pipeline(Order.ONE_F_ONE_B, 4, 8, gathers=Gathers.MICROBATCH), precision="bf16")[1].plan
    assert one.peak_nbytes <= few.peak_nbytes


def links_of(latency_s: float) -> LinkModel:
    """Links of which all but the latency of an arrival between stages takes next to no time."""
    quick = [Link(each, 2, 0.0, 1e18) for each in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)]
    return LinkModel("quick", "made up", 64, (*quick, Link(Operation.RECEIVE, 2, latency_s, 1e18)))


@pytest.mark.slow
def test_a_step_takes_what_its_slowest_rank_does_and_the_bubble() -> None:
    # Large enough that kernels decide, and not their launches; all stages but the ends are alike.
    rows = 1 << 18
    device = replace(find_device("h200"), launch_s=0.0, unit_s=0.0)
    near, far = (
        plan_pipeline(
            config_of(), on_meta, 4, Pipeline(Order.ONE_F_ONE_B, 4, 8), batch=BATCH, samples=rows, device=device,
            links=links_of(latency),
        )
        for latency in (0.0, 1e-3)
    )  # fmt: skip
    assert near.time is not None
    assert far.time is not None
    first, middle, last = (each.plan.time for each in near.ranks)
    assert first is not None
    assert middle is not None
    assert last is not None
    # Two products forwards and four backwards, in each of two blocks.
    assert middle.flops == 8 * 2 * 3 * 2 * rows * BLOCK
    # The last rank has a head as well. Where all took as long, 8 microbatches would take the time of 8 + 3.
    assert near.time.device_s == pytest.approx(last.device_s * 11 / 8)
    own = [each.device_s for each in (first, middle, middle, last)]
    assert near.time.waits == pytest.approx([1 - each / near.time.device_s for each in own])
    # Ranks in the middle receive activations and gradients of each microbatch.
    assert far.ranks[1].plan.time is not None
    assert far.ranks[1].plan.time.device_s == pytest.approx(middle.device_s + 2 * 8 * 1e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [16, pytest.param(64, marks=pytest.mark.nightly)])
def test_thousands_of_ranks(stages: int) -> None:
    pipeline = Pipeline(Order.ONE_F_ONE_B, stages, stages)
    config = config_of(mesh=WorldMesh.pretended({"pp": 1, "dp": 256}), shard="dp")
    found = plan_pipeline(config, on_meta, 256 * stages, pipeline, batch=BATCH, samples=ROWS)
    assert [(each.ranks, each.in_flight) for each in found.ranks] == [
        ((0,), stages),
        (tuple(range(1, stages - 1)), stages - 1),
        ((stages - 1,), 1),
    ]
    for each in found.ranks[:2]:
        row = next(row for row in each.plan.traffic if row.operation is Operation.REDUCE_SCATTER)
        # A rank has one row of each matrix, where the second begins at 512 bytes. Of 256 ranks 64 have any of that.
        assert (row.over, row.ranks, row.received_nbytes) == ("dp", 256, 4 * 2 * (2 * WIDTH + 4 * WIDTH) * 255)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Pipeline(Order.GPIPE, 1, 4), "1 ranks .* is none. Give two ranks or more"),
        (lambda: Pipeline(Order.ONE_F_ONE_B, 4, 3), "needs as many microbatches as stages"),
        (lambda: Pipeline(Order.ONE_F_ONE_B, 4, 8, 2), "no other schedule, has several stages a rank"),
        (lambda: Pipeline(Order.INTERLEAVED_1F1B, 4, 6, 2), "give 'interleaved_1f1b' a multiple of the ranks"),
        (
            lambda: plan_pipeline(config_of(), on_meta, 9, Pipeline(Order.GPIPE, 2, 4), batch=BATCH),
            "world_size is 9, which 2 ranks of a pipeline do not divide",
        ),
        (
            lambda: plan_pipeline(config_of(), several, 8, Pipeline(Order.GPIPE, 2, 4), batch=BATCH),
            "the forward of Several returned tuple, and is no last stage",
        ),
    ],
)
def test_what_no_schedule_takes_is_named(wrong: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wrong()
