"""Replicas, shards, tensor parallel parts and experts at once, on eight ranks: as the whole model, to 1e-12 in fp64."""

from __future__ import annotations

import pytest
from meshed_models import Shape
from meshes import Plan, assert_trains

pytestmark = pytest.mark.slow

REPLICAS = ("dp_replicate", "dp_shard", "tp")


@pytest.mark.parametrize(
    "plan",
    [
        Plan((2, 2, 2), REPLICAS, Shape(sequence=True), ("dp_shard",), ("dp_replicate",)),
        Plan(
            (2, 2, 2),
            REPLICAS,
            Shape(tied=True),
            ("dp_shard",),
            ("dp_replicate",),
            settings=(("strategy", "hybrid_shard_zero2"), ("layout", "rows")),
            optimizer="muon",
            microbatches=2,
        ),
    ],
    ids=str,
)
def test_replicas_and_shards_beside_tensor_parallelism(plan: Plan) -> None:
    assert_trains(plan)


EXPERTS = ("dp_replicate", "edp", "ep")


@pytest.mark.parametrize(
    "plan",
    [
        Plan((2, 2, 2), EXPERTS, Shape(experts=4), ("edp", "ep"), ("dp_replicate",), experts=("edp",)),
        Plan(
            (2, 2, 2),
            EXPERTS,
            Shape(experts=3, kept="dtensor"),
            ("edp", "ep"),
            ("dp_replicate",),
            by_mesh=("dp_replicate", "edp"),
            settings=(("layout", "rows"),),
            optimizer="muon",
        ),
    ],
    ids=str,
)
def test_replicas_of_experts_and_of_all_else(plan: Plan) -> None:
    assert_trains(plan)


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
