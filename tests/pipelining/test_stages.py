"""Stages of a pipeline that are sharded, beside the unsharded model in one process."""

from __future__ import annotations

import math
from contextlib import ExitStack
from inspect import signature
from typing import Any

import pipelines
import polyshard
import pytest
import torch
from parity import Block, units_of
from pipelines import ROWS, Model, Plan, Trainer, batch, loss_of, part_of
from polyshard.errors import ConfigError, PolyshardError, RankMismatchError, StateError, UnsupportedError
from polyshard.interfaces import PluginContext
from polyshard.pipelining import PipelineStage, TiedParameter, clip_grad_norm_
from polyshard.planning import thresholds
from polyshard.planning.parts import gradient_of
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp2 import fully_shard
from processes import KeptRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.utils.flop_counter import FlopCounterMode

RANKS = KeptRanks()
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def assert_parity(plan: Plan) -> None:
    reference, norms = pipelines.expected(plan, 3)
    wanted = dict(reference.named_parameters(remove_duplicate=False))
    seen = set()
    for found, values in RANKS.run(torch.Size(plan.sizes).numel(), pipelines.train, plan):
        assert found == pytest.approx(norms, rel=1e-12)
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
        seen.update(values)
    assert seen == wanted.keys()


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan("GPipe"), marks=pytest.mark.nightly),
        pytest.param(Plan("1F1B", gathers="microbatch"), marks=pytest.mark.nightly),
        Plan("1F1B", gathers="microbatch", settings={"strategy": "shard_grad_op"}),
        pytest.param(Plan("Interleaved1F1B", each=2), marks=pytest.mark.nightly),
        Plan("ZBVZeroBubble", each=2, gathers="microbatch"),
        pytest.param(Plan("ZBVZeroBubble", each=2), marks=pytest.mark.nightly),
        Plan("GPipe", drop_in=True),
        pytest.param(Plan("ZBVZeroBubble", each=2, drop_in=True), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_pipeline_trains_as_the_unsharded_model(plan: Plan) -> None:
    assert_parity(plan)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("gathers", ["schedule", "microbatch"])
@pytest.mark.parametrize(
    ("schedule", "each"),
    [
        ("GPipe", 1),
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_every_schedule_with_every_strategy(schedule: str, each: int, gathers: str, strategy: str) -> None:
    assert_parity(Plan(schedule, each, gathers, {"strategy": strategy}))


HYBRID = {"strategy": "hybrid_shard", "shard": "dp", "replicate": "replicate"}


@pytest.mark.parametrize(
    "plan",
    [
        Plan("1F1B", sizes=(2, 2, 1), names=("pp", "replicate", "dp"), settings=HYBRID),
        Plan("1F1B", sizes=(2, 1, 2), names=("pp", "dp", "tp"), settings={"strategy": "no_shard"}),
        *(
            pytest.param(plan, marks=pytest.mark.nightly)
            for plan in (
                Plan("1F1B", sizes=(2, 2, 2), names=("pp", "dp", "tp"), gathers="microbatch"),
                Plan("1F1B", sizes=(2, 2, 2), names=("pp", "replicate", "dp"), settings=HYBRID),
                Plan("1F1B", sizes=(2, 2, 2), names=("pp", "dp", "tp"), drop_in=True),
            )
        ),
    ],
    ids=str,
)
def test_replicas_and_tensor_parallelism_beside_a_pipeline(plan: Plan) -> None:
    assert_parity(plan)


def evaluated(rank: int, plan: Plan) -> list[torch.Tensor]:
    """What the last stage returns for a batch behind each of two steps; nothing on other ranks."""
    trainer, found = Trainer(plan), []
    inputs, targets = batch(9, trainer.data_rank, plan.microbatches)
    for turn in range(2):
        trainer.step(turn)
        with torch.no_grad():
            output = trainer.schedule.eval(*([inputs] if trainer.place == 0 else []), target=targets)
        found += [] if output is None else [output]
    trainer.close()
    return found


@pytest.mark.parametrize(
    "plan",
    [pytest.param(Plan("1F1B"), marks=pytest.mark.nightly), Plan("Interleaved1F1B", each=2, gathers="microbatch")],
    ids=str,
)
def test_a_pipeline_is_evaluated_between_steps(plan: Plan) -> None:
    outputs = RANKS.run(4, evaluated, plan)
    assert [len(each) for each in outputs] == [0, 0, 2, 2]
    for steps in (1, 2):
        reference, _ = pipelines.expected(plan, steps)
        for data_rank, found in enumerate(outputs[2:]):
            with torch.no_grad():
                wanted = reference(batch(9, data_rank, plan.microbatches)[0])
            torch.testing.assert_close(found[steps - 1], wanted, rtol=1e-12, atol=1e-12)


def two_schedules(rank: int, plan: Plan, waits: bool) -> dict[str, torch.Tensor]:
    """Gradients of this rank's stages behind two schedules, the second of which another one was to precede.

    ``waits``: those of the first are reduced with those of the second.
    """
    trainer = Trainer(plan)
    # Of what ``fully_shard`` sharded, torch 2.15 can leave the first as it is.
    leaves = waits and plan.drop_in and "finalize_gradients" in signature(trainer.schedule.step).parameters
    with ExitStack() as stack:
        for model in trainer.models if waits and not leaves else ():
            stack.enter_context(polyshard.no_sync(model))
        trainer.forward_backward(0, **({"finalize_gradients": False} if leaves else {}))
    if not waits and plan.stages == 1:
        with pytest.raises(ZeroDivisionError):
            trainer.fail(7, microbatch=2)
    trainer.forward_backward(1)
    found = {}
    for model in trainer.models:
        with torch.no_grad():
            for parameter in filter(torch.Tensor.numel, model.parameters()):
                parameter.copy_(parameter.grad)
    found = trainer.values()
    trainer.close()
    return found


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        Plan("1F1B", tied=False),
        # Nothing is sharded or cast: autograd accumulates by itself.
        Plan("GPipe", sizes=(2, 1), tied=False, settings={"strategy": "no_shard"}),
        Plan("GPipe", sizes=(1, 2), tied=False),
        Plan("1F1B", tied=False, drop_in=True),
        pytest.param(Plan("Interleaved1F1B", each=2, tied=False, drop_in=True), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_gradients_of_several_schedules_add_up_and_those_of_one_that_raised_do_not(plan: Plan, waits: bool) -> None:
    model = pipelines.whole_model(plan)
    for turn in range(2):
        pipelines.whole_backward(model, plan, turn)
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found in RANKS.run(torch.Size(plan.sizes).numel(), two_schedules, plan, waits):
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)


def counts(rank: int, gathers: str, accumulates: bool) -> list[tuple[int, int]]:
    """The gathers and reductions of each of two stages in a second step of four microbatches, or of twice as many."""
    groups = [FakeCollectives(PluginContext("fake", CPU), 0, 4) for _ in range(2)]
    whole, stages = pipelines.whole_model(Plan("Interleaved1F1B", tied=False)), []
    for number, collectives in enumerate(groups):
        units = units_of(Block, nn.Embedding)
        config = polyshard.ShardConfig(policy=units, collectives=collectives, batch_nbytes=0)
        stages.append(
            PipelineStage(polyshard.shard(part_of(whole, number, 2), config), number, 2, CPU, gathers=gathers)
        )
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_of)
    optimizer = torch.optim.SGD([each for stage in stages for each in stage.submod.parameters()], lr=0.1)
    for turn in range(2):
        for collectives in groups:
            collectives.calls.clear()
        inputs, targets = batch(turn, 0, 4)
        if accumulates:
            with polyshard.no_sync(stages[0].submod), polyshard.no_sync(stages[1].submod):
                schedule.step(inputs, target=targets)
        schedule.step(inputs, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    operations = [[call.operation for call in collectives.calls] for collectives in groups]
    return [(each.count("all_gather"), each.count("reduce_scatter")) for each in operations]


def test_a_step_reduces_each_unit_once_and_gathers_it_once_a_schedule_or_once_a_microbatch() -> None:
    # Either stage is two blocks of three parameters beside an embedding or a head. Each is gathered by itself, and the
    # sums of a unit travel together.
    assert RANKS.run(1, counts, "schedule", False) == [[(7, 3), (7, 3)]]
    # Each of two schedules gathers, the second one reduces.
    assert RANKS.run(1, counts, "schedule", True) == [[(14, 3), (14, 3)]]
    (found,) = RANKS.run(1, counts, "microbatch", False)
    for gathers, reductions in found:
        assert reductions == 3
        # For each forward, and for each backward that did not follow at once; the embedding for forwards alone.
        assert 4 * 7 < gathers <= 4 * (7 + 7)


def norms(rank: int, plan: Plan) -> list[float]:
    """Of one schedule's gradients, which none of them changes."""
    trainer = Trainer(plan)
    trainer.forward_backward(0)
    found = [float(clip_grad_norm_(trainer.stages, math.inf, order, tied=trainer.tied)) for order in ORDERS]
    trainer.close()
    return found


ORDERS = (1.0, 2.0, math.inf)


def test_norms_of_every_order_are_over_all_stages() -> None:
    plan = Plan("Interleaved1F1B", each=2)
    model = pipelines.whole_model(plan)
    pipelines.whole_backward(model, plan, 0)
    wanted = [float(nn.utils.get_total_norm([each.grad for each in model.parameters()], order)) for order in ORDERS]
    assert RANKS.run(4, norms, plan) == [pytest.approx(wanted, rel=1e-12)] * 4


def scaled(rank: int, plan: Plan, broken: float) -> tuple[float, dict[str, torch.Tensor]]:
    """The scale and parameters behind three steps; in the second, one gradient of one stage is ``broken`` on rank 3."""
    trainer = Trainer(plan)
    scaler = polyshard.GradScaler("cpu", init_scale=1024.0)
    # Ranks without a loss have a scale, too.
    scaler.scale(torch.zeros(()))
    trainer.schedule._loss_fn = lambda output, target: scaler.scale(loss_of(output, target))
    for turn in range(3):
        trainer.forward_backward(turn)
        if turn == 1 and rank == 3:
            gradients = map(gradient_of, trainer.models[-1].blocks.parameters())
            next(each for each in gradients if each is not None and each.numel()).view(-1)[0] = broken
        for optimizer in trainer.optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
    values = trainer.values()
    trainer.close()
    return scaler.get_scale(), values


@pytest.mark.parametrize(
    ("plan", "broken"),
    [
        (Plan("1F1B"), math.nan),
        pytest.param(Plan("Interleaved1F1B", each=2, drop_in=True), math.inf, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_gradient_that_overflows_in_one_stage_makes_all_stages_skip(plan: Plan, broken: float) -> None:
    model = pipelines.whole_model(plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for turn in (0, 2):
        pipelines.whole_backward(model, plan, turn)
        optimizer.step()
        optimizer.zero_grad()
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for scale, values in RANKS.run(4, scaled, plan, broken):
        assert scale == 512.0
        for name, value in values.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)


class Counting(PipelineStage):
    """Counts the operations of backwards of inputs, and of those of weights."""

    of_inputs = of_weights = 0

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with FlopCounterMode(display=False) as counter:
            super().backward_one_chunk(*args, **kwargs)
        self.of_inputs += counter.get_total_flops()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with FlopCounterMode(display=False) as counter:
            super().backward_weight_one_chunk(*args, **kwargs)
        self.of_weights += counter.get_total_flops()


def operations(rank: int, gathers: str) -> tuple[int, int]:
    """Of the second of two stages in a schedule: those of inputs' gradients, and of weights' behind them."""
    whole, stages = pipelines.whole_model(Plan("InterleavedZeroBubble", tied=False)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thresholds, "DIRECT_NUMEL", 1)
        for number in range(2):
            collectives = FakeCollectives(PluginContext("fake", CPU), 0, 4)
            config = polyshard.ShardConfig(policy=units_of(Block, nn.Embedding), collectives=collectives)
            stages.append(Counting(polyshard.shard(part_of(whole, number, 2), config), number, 2, CPU, gathers=gathers))
        inputs, targets = batch(0, 0, 4)
        ScheduleInterleavedZeroBubble(stages, 4, loss_fn=loss_of).step(inputs, target=targets)
    return stages[1].of_inputs, stages[1].of_weights


def test_weights_gradients_are_computed_apart_where_parameters_stay() -> None:
    # Two products of 6 x 8 in each of two blocks and one of 6 x 12, for 24 tokens, two operations an element.
    products = 24 * (2 * 2 * 6 * 8 + 6 * 12) * 2
    assert RANKS.run(1, operations, "schedule") == [(products, products)]
    assert RANKS.run(1, operations, "microbatch") == [(2 * products, 0)]


def message_of(rank: int, case: str) -> str:
    """The error of a wrong use on this rank; empty where there is none."""
    try:
        WRONG[case](rank)
    except PolyshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shard_over(part: nn.Module, mesh: Any, **settings: Any) -> nn.Module:
    config = polyshard.ShardConfig(mesh=mesh, policy=units_of(Block, nn.Embedding), strategy="no_shard", **settings)
    return polyshard.shard(part, config)


def parts(rank: int) -> tuple[Any, Model]:
    """A mesh of two stages, and this rank's."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    return mesh, part_of(pipelines.whole_model(Plan("GPipe")), rank, 2)


def not_sharded(rank: int) -> None:
    PipelineStage(parts(rank)[1], rank, 2, CPU)


def over_all_ranks(rank: int) -> None:
    PipelineStage(polyshard.shard(Block()), rank, 2, CPU)


def one_module_twice(rank: int) -> None:
    mesh, part = parts(rank)
    shard_over(part, mesh["dp"])
    stage = PipelineStage(part, rank, 4, CPU)
    PipelineStage(part, stage.stage_index + 2, 4, CPU)


def one_parameter_twice(rank: int) -> None:
    mesh, part = parts(rank)
    other = Block(part.blocks[str(2 * rank)].up.in_features, 8).double()
    other.up = part.blocks[str(2 * rank)].up
    shard_over(part, mesh["dp"])
    PipelineStage(shard_over(other, mesh["dp"]), rank, 2, CPU)


def no_loss(rank: int) -> None:
    mesh, part = parts(rank)
    stage = PipelineStage(shard_over(part, mesh["dp"]), rank, 2, CPU)
    inputs, _ = batch(0, 0, 4)
    with torch.no_grad():
        ScheduleGPipe(stage, 4).step(*([] if rank else [inputs]))
    ScheduleGPipe(stage, 4).step(*([] if rank else [inputs]))


def gathers_for_a_step(rank: int) -> None:
    mesh, part = parts(rank)
    PipelineStage(shard_over(part, mesh["dp"]), rank, 2, CPU, gathers="step")


def microbatches_of_fully_shard(rank: int) -> None:
    mesh, part = parts(rank)
    PipelineStage(fully_shard(part, mesh=mesh["dp"]), rank, 2, CPU, gathers="microbatch")


def uneven(rank: int, rows: int) -> None:
    """A batch of so many rows, and one that four microbatches divide."""
    mesh, part = parts(rank)
    stage = PipelineStage(shard_over(part, mesh["dp"]), rank, 2, CPU)
    inputs, targets = batch(0, 0, 4)
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of)

    def step(rows: int) -> None:
        schedule.step(*([] if rank else [inputs[:rows]]), target=targets[:rows] if rank else None)

    try:
        step(rows)
    finally:
        step(4 * ROWS)
        assert all(parameter.grad is not None for parameter in part.parameters())
        if rank == 0:
            # The other rank would wait.
            with pytest.raises(ConfigError, match=r"\[\(1, 3\)\], and not \[\(2, 3\)\]"):
                step(4)


def divided(rank: int, rows: int) -> tuple[str, dict[str, torch.Tensor]]:
    """The error of a batch that the caller divided, with ``rows`` in the last microbatch; gradients behind it."""
    mesh, part = parts(rank)
    stage = PipelineStage(shard_over(part, mesh["dp"]), rank, 2, CPU)
    schedule: Any = ScheduleGPipe(stage, 4, loss_fn=loss_of)
    inputs, targets = (list(each.split(ROWS)) for each in batch(0, 0, 4))

    def step(inputs: list[torch.Tensor]) -> None:
        schedule.step(**({"target_mbs": targets} if rank else {"arg_mbs": [(each,) for each in inputs]}))

    text = ""
    try:
        step([*inputs[:3], *([inputs[3][:rows]] if rows else [])])
    except ConfigError as error:
        text = str(error)
        step(inputs)
    return text, {name: parameter.grad.full_tensor() for name, parameter in part.named_parameters()}


@pytest.mark.skipif("arg_mbs" not in signature(ScheduleGPipe.step).parameters, reason="torch 2.15 takes such batches")
@pytest.mark.parametrize(
    ("rows", "shapes"), [(ROWS, ""), (1, "[(1, 3)], and not [(2, 3)]"), (0, "[], and not [(2, 3)]")]
)
def test_batches_that_the_caller_divided_are_trained_on_or_refused_on_every_rank(rows: int, shapes: str) -> None:
    model = pipelines.whole_model(Plan("GPipe"))
    # Each stage has one of its own.
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    inputs, targets = batch(0, 0, 4)
    loss_of(model(inputs), targets).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for text, found in RANKS.run(2, divided, rows):
        assert shapes in text
        assert bool(text) is bool(shapes)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


def tied(rank: int, names: dict[int, str], change: float = 0.0, **settings: Any) -> None:
    mesh, part = parts(rank)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter += change * rank
    TiedParameter([PipelineStage(shard_over(part, mesh["dp"], **settings), rank, 2, CPU)], names)


TIED = {0: "embedding.weight", 1: "head.weight"}
WRONG: dict[str, Any] = {
    "not sharded": not_sharded,
    "over all ranks": over_all_ranks,
    "one module twice": one_module_twice,
    "one parameter twice": one_parameter_twice,
    "no loss": no_loss,
    "gathers for a step": gathers_for_a_step,
    "microbatches of fully_shard": microbatches_of_fully_shard,
    "uneven": lambda rank: uneven(rank, 3 * ROWS + 1),
    "too few": lambda rank: uneven(rank, 3),
    "tied, one stage": lambda rank: tied(rank, {0: "embedding.weight"}),
    "tied, no such name": lambda rank: tied(rank, {0: "embedding.weight", 1: "head.bias"}),
    "tied, other shapes": lambda rank: tied(rank, {0: "embedding.weight", 1: "blocks.3.up.weight"}),
    "tied, other values": lambda rank: tied(rank, TIED, change=1.0),
}


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("not sharded", StateError, ["PipelineStage() needs a sharded module", "this Model is not sharded"]),
        ("over all ranks", ConfigError, ["sharded over the ranks [0, 1]", "mesh=mesh['dp']"]),
        ("one module twice", ConfigError, ["stage 2 is stage 0's already", "stage 3 is stage 1's already"]),
        ("one parameter twice", PolyshardError, ["up."]),
        ("no loss", StateError, ["has no loss_fn", "torch.no_grad()"]),
        ("gathers for a step", ConfigError, ["'step' is neither 'schedule' nor 'microbatch'"]),
        ("microbatches of fully_shard", UnsupportedError, ["fully_shard", "polyshard.shard"]),
        ("uneven", ConfigError, ["the shapes [(1, 3)], and not [(2, 3)] (stage 0, rank 0)", "4 microbatches"]),
        ("too few", ConfigError, ["the shapes [], and not [(1, 3)]"]),
        ("tied, one stage", ConfigError, ["stages [0]", "Name two"]),
        ("tied, no such name", ConfigError, ["'head.bias' of stage 1", "no sharded parameter"]),
        ("tied, other shapes", UnsupportedError, ["'embedding.weight' of stage 0", "'blocks.3.up.weight' of stage 1"]),
        ("tied, other values", RankMismatchError, ["values of 'embedding.weight' of stage 0 and 'head.weight'"]),
    ],
)
def test_wrong_use_is_refused_on_every_rank(case: str, error: type[PolyshardError], words: list[str]) -> None:
    found = RANKS.run(2, message_of, case)
    print(found)
    assert all(found)
    for word in words:
        assert any(word in each for each in found)
