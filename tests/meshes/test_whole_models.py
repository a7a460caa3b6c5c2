"""The models and the sums that tests of meshes compare with, by plain collectives: no line of polyshard takes part."""

from __future__ import annotations

import pytest
from meshed_models import Shape
from meshes import Plan, Trainer, assert_trains

TP = {"sizes": (2, 2), "names": ("dp", "tp"), "shard": ("dp",)}
EP = {"sizes": (2, 2), "names": ("edp", "ep"), "shard": ("edp", "ep"), "experts": ("edp",)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(**TP, shape=Shape()), marks=pytest.mark.nightly),
        Plan(**TP, shape=Shape(sequence=True, tied=True), microbatches=2),
        pytest.param(Plan((1, 4), ("dp", "tp"), Shape(sequence=True), ("dp",)), marks=pytest.mark.nightly),
        pytest.param(Plan(**EP, shape=Shape(experts=4, closed=(2,))), marks=pytest.mark.nightly),
        pytest.param(Plan(**EP, shape=Shape(experts=3, kept="dtensor")), marks=pytest.mark.nightly),
        pytest.param(Plan(**EP, shape=Shape(experts=4, kept="modules", closed=(0,))), marks=pytest.mark.nightly),
        pytest.param(
            Plan((1, 4), ("edp", "ep"), Shape(experts=3, kept="dtensor"), ("edp", "ep"), experts=("edp",)),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Plan((2, 2, 2), ("dp_replicate", "ep", "tp"), Shape(experts=3, kept="dtensor"), ("ep",), ("dp_replicate",)),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_collectives_by_hand_train_as_the_whole_model(plan: Plan) -> None:
    assert_trains(plan, by=Trainer)
