"""Experts on ranks of their own, beside sharding, train as a whole mixture of experts does, to 1e-12 in fp64."""

from __future__ import annotations

from typing import Any

import pytest
from meshed_models import Shape
from meshes import Plan, assert_trains

EP: dict[str, Any] = {"sizes": (2, 2), "names": ("edp", "ep"), "shard": ("edp", "ep"), "experts": ("edp",)}
ALONE: dict[str, Any] = {**EP, "sizes": (1, 4)}
ZERO_2 = ("strategy", "shard_grad_op")
OFFLOAD = ("offload", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        # Two experts here, one there.
        Plan(**EP, shape=Shape(experts=3, kept="dtensor"), settings=(ZERO_2,), optimizer="muon"),
        # No rank calls the first expert, and no rank has a gradient of it.
        Plan(**EP, shape=Shape(experts=4, kept="modules", closed=(0,)), settings=(OFFLOAD,), microbatches=2),
    ],
    ids=str,
)
def test_experts_over_two_ranks_with_two_shards_each(plan: Plan) -> None:
    assert_trains(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        # The last rank has none of three experts.
        Plan(**ALONE, shape=Shape(experts=3, kept="dtensor", recomputed=True)),
        # The first rank's only expert is never called.
        pytest.param(
            Plan(**ALONE, shape=Shape(experts=4, kept="modules", closed=(0,)), optimizer="flat"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_groups_of_one_rank(plan: Plan) -> None:
    assert_trains(plan)


@pytest.mark.slow
@pytest.mark.parametrize("divisor", ["group", pytest.param("sum", marks=pytest.mark.nightly), 3.0])
def test_gradients_of_experts_are_divided_as_said(divisor: Any) -> None:
    """By the two ranks that hold an expert, not at all, by 3: each against the sum of a whole model's."""
    assert_trains(Plan(**EP, shape=Shape(experts=4), divisor=divisor, steps=0, microbatches=2))


@pytest.mark.slow
def test_a_policy_may_give_experts_a_mesh() -> None:
    """Of replicas and shards, which are others than those of all else."""
    experts: dict[str, Any] = {"shape": Shape(experts=3, kept="dtensor"), "by_mesh": ("dp_replicate", "edp")}
    names, shard = ("dp_replicate", "edp", "ep"), ("edp", "ep")
    assert_trains(Plan((2, 1, 2), names, shard=shard, replicate=("dp_replicate",), **experts))
