"""Sharding beside tensor parallelism trains as the whole model does, to 1e-12 in fp64."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from meshed_models import Net, Shape
from meshes import Plan, Polyshard, assert_trains, coordinate_of, expected, meshed, run
from torch.distributed.tensor import DTensor

TP: dict[str, Any] = {"sizes": (2, 2), "names": ("dp", "tp"), "shard": ("dp",)}
ROWS = ("layout", "rows")
ZERO_2 = ("strategy", "shard_grad_op")
OFFLOAD = ("offload", "cpu")
AUTO = (("reshard_after_forward", "auto"), ("memory_budget", "1 GiB"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(**TP, shape=Shape()), marks=pytest.mark.nightly),
        pytest.param(
            Plan(**TP, shape=Shape(sequence=True), settings=(ZERO_2, ROWS), optimizer="muon"), marks=pytest.mark.nightly
        ),
        Plan(**TP, shape=Shape(tied=True, recomputed=True), settings=(ROWS, OFFLOAD, *AUTO), microbatches=2),
        Plan(**TP, shape=Shape(sequence=True, tied=True), settings=(ZERO_2, OFFLOAD), optimizer="muon", microbatches=2),
    ],
    ids=str,
)
def test_shards_over_two_ranks_beside_two_parts(plan: Plan) -> None:
    assert_trains(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        # Parts of 3, 3, 3 and 1 hidden columns, and nobody to share a gradient with.
        Plan((1, 4), ("dp", "tp"), Shape(sequence=True), ("dp",), optimizer="muon"),
        pytest.param(
            Plan((1, 4), ("dp", "tp"), Shape(), ("dp",), settings=(OFFLOAD,), microbatches=2), marks=pytest.mark.nightly
        ),
        pytest.param(
            Plan(
                (4, 1), ("dp", "tp"), Shape(sequence=True, recomputed=True), ("dp",), settings=(ROWS,), optimizer="flat"
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_groups_of_one_rank(plan: Plan) -> None:
    assert_trains(plan)


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


Pieces = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, torch.Tensor]]


def gradient_pieces(rank: int, plan: Plan) -> tuple[dict[str, int], Pieces]:
    """Of each parameter by ``placement``: whole shape, offset and sizes of the part, the range of it, the gradient."""
    with meshed(plan, rank) as (model, mesh):
        trainer, place = Polyshard(plan, model, mesh), coordinate_of(mesh)
        model(plan.batch(0, plan.data_rank(place), 0)).backward()
        pieces: Pieces = {}
        for name, parameter in model.named_parameters():
            placed = polyshard.placement(parameter)
            # None where this rank holds nothing of it.
            part, gradient = placed.part, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert gradient.shape == parameter.shape
            whole, offset = (part.shape, part.offset) if part else (placed.shape, (0,) * len(placed.shape))
            pieces[name] = (whole, offset, placed.shape, placed.start, placed.stop, gradient.flatten())
        trainer.close()
    return place, pieces


@pytest.mark.slow
def test_placement_tells_where_each_gradient_lies() -> None:
    plan = Plan(**TP, shape=Shape(sequence=True), steps=0)
    ranks = [pieces for _, pieces in run(plan.world_size, gradient_pieces, plan)]
    for name, wanted in expected(plan).gradients.items():
        found = torch.full_like(wanted, torch.nan)
        for pieces in ranks:
            whole, offset, sizes, start, stop, gradient = pieces[name]
            assert whole == wanted.shape
            box = found[tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True))]
            at = torch.unravel_index(torch.arange(start, stop), sizes)
            box[at] = gradient
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


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
        assert all(type(each.data) is torch.Tensor and each.ndim == 1 for each in model.parameters())
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
