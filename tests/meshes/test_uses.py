"""What programs do with a model beside its training steps, on a mesh: each as the whole model does it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import polyshard
import pytest
import torch
from matrices import most_apart
from meshed_models import Shape, parallelize
from meshes import Plan, Polyshard, assert_trains, config_of, coordinate_of, expected, full, make, mesh_of, meshed, run
from polyshard.errors import ConfigError
from polyshard.inspect import units_in
from polyshard.planning import parts
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.slow

TP = Plan((2, 2), ("dp", "tp"), Shape(sequence=True), ("dp",), steps=0)
EP = Plan((2, 2), ("edp", "ep"), Shape(experts=3, kept="dtensor"), ("edp", "ep"), experts=("edp",), steps=0)


def used(rank: int, plan: Plan) -> tuple[list[float], float, float]:
    """How far losses without a backward are from the whole model's, gradients from those of the mean over all tokens,
    of which data ranks have different numbers, and parameters from twice what they were before they were doubled."""
    with meshed(plan, rank) as (model, mesh):
        trainer, data_rank = Polyshard(plan, model, mesh), plan.data_rank(coordinate_of(mesh))
        model.eval()
        tokens, wanted = plan.batch(0, data_rank, 0), expected(plan).losses[0][data_rank]
        with torch.no_grad():
            losses = [model(tokens).item()]
        with torch.inference_mode():
            losses.append(model(tokens).item())
        with polyshard.unsharded(model), torch.no_grad():
            losses.append(model(tokens).item())
        model.train()
        before, count = trainer.whole(), 3 + 2 * data_rank
        # The loss is a mean: as that of so many tokens.
        (model(tokens) * count / polyshard.token_divisor(model, count)).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        after = trainer.whole()
        with polyshard.unsharded(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        doubled = trainer.whole()
        trainer.close()
    return (
        [abs(loss - wanted) for loss in losses],
        most_apart({name: each - after[name] for name, each in before.items()}, mean_gradients(plan)),
        most_apart(doubled, {name: 2 * each for name, each in after.items()}),
    )


@functools.cache
def mean_gradients(plan: Plan) -> dict[str, torch.Tensor]:
    """Of the mean over all tokens, in one process."""
    whole, counts = make(plan), [3 + 2 * each for each in range(plan.data_size)]
    for data_rank, count in enumerate(counts):
        (whole(plan.batch(0, data_rank, 0)) * count / sum(counts)).backward()
    return {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("plan", [TP, EP], ids=str)
def test_evaluation_a_mean_over_all_tokens_and_changes_of_whole_parameters(plan: Plan) -> None:
    for losses, gradients, parameters in run(4, used, plan):
        assert max(losses) < 1e-12
        assert gradients < 1e-12
        assert parameters == 0.0


def handed_out(rank: int, plan: Plan) -> tuple[dict[str, torch.Tensor], ...]:
    """Whole weights: as they are, in bf16 on one rank alone, of one block, and doubled by pairs that every rank has."""
    with meshed(plan, rank) as (model, mesh):
        trainer = Polyshard(plan, model, mesh)
        found: list[dict[str, torch.Tensor]] = []
        with mock.patch.object(parts, "_all_gather", wraps=parts._all_gather) as gather:
            for _ in polyshard.stream(model):
                pass
        cut = [[each.part.is_even for each in unit.parameters if each.part is not None] for unit in units_in(model)]
        assert gather.call_count == sum(map(any, cut))
        for settings in ({}, {"dtype": torch.bfloat16, "ranks": [2], "bucket_nbytes": 1 << 20}):
            found.append({})
            for names, tensors in polyshard.stream(model, **settings):
                found[-1].update(zip(names, tensors, strict=True))
        found.append(polyshard.state.get_model_state_dict(model.blocks[0], polyshard.state.StateOptions(form="full")))
        with polyshard.unsharded(model.blocks[0]):
            assert all(torch.equal(full(each), found[-1][name]) for name, each in model.blocks[0].named_parameters())
        polyshard.load_stream(model, ((name, 2 * each) for name, each in found[0].items()))
        found.append(trainer.whole())
        trainer.close()
    return tuple(found)


@pytest.mark.parametrize(
    "plan",
    [
        dataclasses.replace(TP, settings=(("strategy", "shard_grad_op"),)),
        # Parts of two sizes, and of one.
        EP,
        pytest.param(dataclasses.replace(EP, shape=Shape(experts=4, kept="dtensor")), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_weights_are_handed_out_whole(plan: Plan) -> None:
    wanted = {name: each.detach() for name, each in make(plan).named_parameters()}
    for rank, (whole, narrow, block, doubled) in enumerate(run(4, handed_out, plan)):
        assert whole.keys() == doubled.keys() == wanted.keys()
        assert narrow.keys() == (wanted.keys() if rank == 2 else set())
        assert block.keys() == {name[9:] for name in wanted if name.startswith("blocks.0.")}
        assert all(torch.equal(value, wanted[f"blocks.0.{name}"]) for name, value in block.items())
        for name, value in wanted.items():
            assert torch.equal(whole[name], value), name
            assert torch.equal(doubled[name], 2 * value), name
        for name, value in narrow.items():
            assert torch.equal(value, wanted[name].bfloat16()), name


def partly_frozen(rank: int, plan: Plan) -> float:
    """How far the norm of gradients is from that of the whole model's without those of attention and half an expert."""
    with meshed(plan, rank) as (model, mesh):
        frozen = [name for name, _ in model.named_parameters() if "attention" in name or "experts.up" in name]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        trainer = Polyshard(plan, model, mesh)
        model(plan.batch(0, plan.data_rank(coordinate_of(mesh)), 0)).backward()
        wanted = expected(plan).gradients
        norm = torch.cat([each.flatten() for name, each in wanted.items() if name not in frozen]).norm().item()
        off = abs(trainer.clip(math.inf) - norm)
        trainer.close()
    return off


@pytest.mark.parametrize("plan", [TP, EP], ids=str)
def test_frozen_parameters(plan: Plan) -> None:
    assert max(run(4, partly_frozen, plan)) < 1e-12


def raising(rank: int) -> float:
    """How far the norm of a step is behind one that a hook ended in forward, and one in backward."""
    with meshed(TP, rank) as (model, mesh):
        trainer = Polyshard(TP, model, mesh)
        tokens = TP.batch(0, TP.data_rank(coordinate_of(mesh)), 0)
        first, second = (block.attention for block in model.blocks)
        for register in (second.register_forward_pre_hook, first.register_full_backward_hook):
            handle = register(_raise)
            with pytest.raises(ArithmeticError):
                model(tokens).backward()
            handle.remove()
            model.zero_grad()
        model(tokens).backward()
        off = abs(trainer.clip(math.inf) - expected(TP).norms[0])
        trainer.close()
    return off


def _raise(*_: Any) -> None:
    raise ArithmeticError


def test_a_step_behind_one_that_a_hook_ended() -> None:
    assert max(run(4, raising)) < 1e-12


class Scaled(nn.Module):
    """A plain parameter beside the tensor parallel ones."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(tokens) * self.scale
        return loss


def scaled(rank: int) -> tuple[float, float]:
    with meshed(TP, rank) as (model, mesh):
        outer, place = Scaled(model), coordinate_of(mesh)
        polyshard.shard(outer, config_of(TP, mesh))
        outer(TP.batch(0, TP.data_rank(place), 0)).backward()
        norm = polyshard.clip_grad_norm_(outer, math.inf).item()
        torch.optim.SGD(outer.parameters(), lr=1.0).step()
        with polyshard.unsharded(outer):
            moved = 0.5 - full(outer.scale.detach()).item()
        polyshard.close(outer)
    return moved, norm


def test_a_scalar_that_all_ranks_have_counts_once() -> None:
    """The loss is half the whole model's: so are gradients, and that of the factor is the loss."""
    wanted = expected(TP)
    mean = sum(wanted.losses[0]) / 2
    for moved, norm in run(4, scaled):
        assert abs(moved - mean) < 1e-12
        assert abs(norm - math.hypot(wanted.norms[0] / 2, mean)) < 1e-12


REPLICATED = Plan((2, 2), ("dp", "tp"), Shape(), ("dp",), steps=0)


def with_dropout(rank: int) -> tuple[float, list[float]]:
    """A loss beside that of the whole model, with dropout, and what ranks draw before and behind a restored state."""

    def loss_of(model: nn.Module, data_rank: int) -> float:
        handle = model.get_submodule("blocks.0").register_forward_hook(
            lambda _, args, output: functional.dropout(output)
        )
        torch.manual_seed(7 + data_rank)
        loss = model(REPLICATED.batch(0, data_rank, 0))
        handle.remove()
        return loss.item()

    with meshed(REPLICATED, rank) as (model, mesh):
        trainer, data_rank = Polyshard(REPLICATED, model, mesh), REPLICATED.data_rank(coordinate_of(mesh))
        off = abs(loss_of(model, data_rank) - loss_of(make(REPLICATED), data_rank))
        states = polyshard.random_states(model)
        drawn = [torch.rand(()).item()]
        polyshard.restore_random_states(model, states)
        drawn.append(torch.rand(()).item())
        trainer.close()
    with meshed(EP, rank) as (model, mesh):
        trainer = Polyshard(EP, model, mesh)
        with pytest.raises(ConfigError, match=r"of units over other ranks \(2 of 4 over dp\) than rank \d has now"):
            polyshard.restore_random_states(model, states)
        trainer.close()
    return off, drawn


def test_dropout_is_that_of_the_whole_model_and_random_states_belong_to_a_mesh() -> None:
    ranks = run(4, with_dropout)
    assert max(off for off, _ in ranks) < 1e-12
    assert all(before == after for _, (before, after) in ranks)
    # Ranks of one tensor parallel group draw alike, those of another otherwise.
    assert ranks[0][1] == ranks[1][1] != ranks[2][1] == ranks[3][1]


# Replicas, shards, tensor parallel parts and experts at once, on eight ranks: as the whole model, to 1e-12 in fp64.

EXPERTS = ("dp_replicate", "edp", "ep")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "plan",
    [
        Plan(
            (2, 2, 2),
            EXPERTS,
            Shape(experts=3, kept="dtensor"),
            ("edp", "ep"),
            ("dp_replicate",),
            by_mesh=("dp_replicate", "edp"),
            optimizer="muon",
        ),
        # Neighbours of dense units are others than those of experts, and as many.
        Plan(
            (4, 2),
            ("edp", "ep"),
            Shape(experts=4),
            ("edp", "ep"),
            experts=("edp",),
            settings=(("reshard_after_forward", 2),),
        ),
    ],
    ids=str,
)
def test_replicas_of_experts_and_of_all_else(plan: Plan) -> None:
    assert_trains(plan)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_that_are_tensor_parallel_beside_replicas(optimizer: str) -> None:
    """Dense units have two replicas of two shards; experts, cut over ``ep`` and ``tp``, two replicas of one."""
    assert_trains(
        Plan(
            (2, 1, 2, 2),
            ("dp_replicate", "edp", "ep", "tp"),
            Shape(experts=4, kept="dtensor"),
            ("edp", "ep"),
            ("dp_replicate",),
            experts=("edp",),
            optimizer=optimizer,  # type: ignore[arg-type]
        )
    )


def models_of_stages(rank: int, parts: int) -> list[float]:
    """How far the norms of two models of one stage, one after the other, are from that of the whole model."""
    stage = Plan((2, parts), ("dp", "tp"), Shape(), ("dp",), steps=0)
    mesh = mesh_of((2, *stage.sizes), ("pp", *stage.names), "cpu")["dp", "tp"]
    offs = []
    for _ in range(2):
        trainer = Polyshard(stage, parallelize(make(stage), mesh), mesh)
        trainer.model(stage.batch(0, stage.data_rank(coordinate_of(mesh)), 0)).backward()
        offs.append(abs(trainer.clip(math.inf) - expected(stage).norms[0]))
        # Groups that only a part of the job makes are made once: torch cannot make a second one of a name.
        trainer.close()
    return offs


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_stages_of_a_pipeline_have_a_mesh_each(parts: int) -> None:
    assert max(max(offs) for offs in run(4 * parts, models_of_stages, parts)) < 1e-12
