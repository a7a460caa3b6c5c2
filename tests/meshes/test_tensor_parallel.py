"""Sharding beside tensor parallelism; that it trains as the whole model does, drawn meshes show, too."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from meshed_models import Net, Shape
from meshes import Plan, Polyshard, assert_trains, coordinate_of, expected, meshed, run
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

TP: dict[str, Any] = {"sizes": (2, 2), "names": ("dp", "tp"), "shard": ("dp",)}


@pytest.mark.slow
def test_bf16_trains_as_fp32_within_rounding() -> None:
    plan = Plan(
        **TP,
        shape=Shape(sequence=True),
        settings=(("precision", "bf16"),),
        optimizer="sgd",
        steps=1,
        dtype=torch.float32,
    )
    # Gradients are as large as 0.3, and bf16 has 8 bits.
    assert_trains(plan, tolerance=1e-2)


def whole_gradients(rank: int, plan: Plan) -> dict[str, torch.Tensor]:
    """Of each parameter, by torch's own gathers."""
    with meshed(plan, rank) as (model, mesh):
        trainer, place = Polyshard(plan, model, mesh), coordinate_of(mesh)
        model(plan.batch(0, plan.data_rank(place), 0)).backward()
        found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        trainer.close()
    return found


@pytest.mark.slow
def test_placements_tell_where_each_gradient_lies() -> None:
    plan = Plan(**TP, shape=Shape(sequence=True), steps=0)
    wanted = expected(plan).gradients
    for found in run(plan.world_size, whole_gradients, plan):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def what_is_seen(rank: int, plan: Plan) -> dict[str, tuple[str, str]]:
    """Of each parameter: its kind in a forward, and inside of ``unsharded``."""
    with meshed(plan, rank) as (model, mesh):
        before = {name: _kind(each) for name, each in model.named_parameters()}
        trainer = Polyshard(plan, model, mesh)
        inside: dict[str, str] = {}

        def look(module: Net, inputs: Any) -> None:
            for name, parameter in model.blocks[0].named_parameters():
                inside[f"blocks.0.{name}"] = _kind(parameter)

        model.blocks[0].attention.register_forward_pre_hook(look)
        model(plan.batch(0, 0, 0)).backward()
        with polyshard.unsharded(model):
            shown = {name: _kind(each) for name, each in model.named_parameters()}
        weight = model.get_parameter("blocks.0.feed.up.weight")
        assert (weight.device_mesh, weight.shape) == (mesh, (10, 8))
        assert weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
        assert weight.to_local().shape == ((3, 8) if mesh.get_local_rank("dp") == 0 else (2, 8))
        trainer.close()
    assert shown == before
    return {name: (before[name], kind) for name, kind in inside.items()}


def _kind(parameter: torch.Tensor) -> str:
    placed = parameter.placements if isinstance(parameter, DTensor) else ""
    return f"{type(parameter).__name__ if placed else 'plain'}{tuple(parameter.shape)}{placed}"


@pytest.mark.slow
def test_forward_and_unsharded_show_what_tensor_parallelism_made() -> None:
    seen = run(4, what_is_seen, Plan(**TP, shape=Shape()))
    for kinds in seen:
        assert len(kinds) > 10
        for before, inside in kinds.values():
            assert inside == before
        assert kinds["blocks.0.feed.up.weight"][1] == "DTensor(10, 8)(Shard(dim=0),)"
        assert kinds["blocks.0.before.weight"][1] == "plain(8,)"
