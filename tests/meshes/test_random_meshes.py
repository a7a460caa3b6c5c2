"""Random meshes, models and settings: a step of each gives losses, norm and gradients of the whole model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from meshed_models import Shape
from meshes import Plan, assert_trains

#: By number of ranks.
SIZES = {2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)], 4: [(1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4)]}


def drawn(seed: int) -> Plan:
    """A plan of 2, 4 or, rarely, 8 ranks."""
    pick = random.Random(seed)
    ranks = pick.choice([2, 4, 4, 4, 8])
    replicas, shards, parts = (2, 2, 2) if ranks == 8 else pick.choice(SIZES[ranks])
    layout = pick.choice(["flat", "rows"])
    settings: list[tuple[str, Any]] = [("layout", layout), ("offload", pick.choice(["none", "none", "cpu"]))]
    settings.append(("batch_nbytes", pick.choice([0, 4096, "128 MiB"])))
    hybrid = replicas > 1 or pick.random() < 0.3
    if hybrid:
        settings.append(("strategy", pick.choice(["hybrid_shard", "hybrid_shard_zero2"])))
    else:
        settings.append(("strategy", pick.choice(["full_shard", "shard_grad_op"])))
    more: dict[str, Any] = {
        "replicate": ("dp_replicate",) if hybrid else (),
        "settings": tuple(settings),
        "microbatches": pick.choice([1, 1, 2]),
        "steps": 0,
    }
    blocks, tied = pick.choice([1, 2, 3]), pick.random() < 0.3
    if pick.random() < 0.5:
        shape = Shape(sequence=pick.random() < 0.5, tied=tied, blocks=blocks, hidden=pick.choice([8, 10, 13]))
        return Plan((replicas, shards, parts), ("dp_replicate", "dp_shard", "tp"), shape, ("dp_shard",), **more)
    kept = pick.choice(["grouped", "dtensor", "modules"])
    experts = pick.choice([3, 5, 6]) if kept == "dtensor" else 4
    closed = tuple(pick.sample(range(experts), pick.choice([0, 1])))
    shape = Shape(experts=experts, kept=kept, closed=closed, tied=tied, blocks=blocks)
    names = ("dp_replicate", "edp", "ep")
    divisor = pick.choice([None, "data", "group", "sum", 6.0])
    return Plan((replicas, shards, parts), names, shape, ("edp", "ep"), experts=("edp",), divisor=divisor, **more)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 8])
def test_a_step(seed: int) -> None:
    """Replicas beside tensor parallelism, and beside experts."""
    assert_trains(drawn(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted({*range(50)} - {4, 8}))
def test_a_step_of_many(seed: int) -> None:
    assert_trains(drawn(seed))
