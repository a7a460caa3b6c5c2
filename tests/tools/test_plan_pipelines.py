"""Plans of pipelines, beside formulas, the order of torch's schedules, and what stages ask to be sent meanwhile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import polyshard
import pytest
import torch
from polyshard import ShardConfig
from polyshard.interfaces import PluginContext
from polyshard.pipelining import Gathers, PipelineStage
from polyshard_backends.fake import FakeCollectives
from polyshard_tools.forecast import Operation, Order, Pipeline, RankPlan, ShapedBatches, plan_pipeline
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


@pytest.fixture(scope="module", autouse=True)
def close_ranks() -> Iterator[None]:
    yield
    RANKS.close()


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


def on_meta(number: int, stages: int) -> nn.Module:
    with torch.device("meta"):
        return Stage(number, stages)


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
        wire = Counter[str]()
        for row in found[rank].plan.wire:
            if row.operation is not Operation.RECEIVE:
                wire[row.operation.value] += row.received_nbytes
        assert wire == sent, rank
        assert sent["reduce_scatter"] == 2 * (2 * each * BLOCK + rank * WIDTH * WIDTH) * (SHARING - 1) // SHARING
        assert list(pipeline.steps(rank)) == actions
