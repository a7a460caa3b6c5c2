"""Replicas, shards, tensor parallel parts and experts at once, on eight ranks: as the whole model, to 1e-12 in fp64.

Others are drawn in test_drawn_meshes.py.
"""

from __future__ import annotations

import math

import pytest
from meshed_models import Shape, parallelize
from meshes import Plan, Polyshard, assert_trains, coordinate_of, expected, make, mesh_of, run

pytestmark = pytest.mark.slow

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
