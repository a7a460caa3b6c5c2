"""Parts of sequences over ranks (context parallelism), and meshes that are drawn: parts and experts."""

from __future__ import annotations

import random
from typing import Any

import polyshard
import pytest
import torch
from long_sequences import Net, assert_as_whole, sequences, train
from meshed_models import Shape
from meshes import Plan, assert_trains, mesh_of, run
from parity import seeded
from polyshard.errors import RankMismatchError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "sizes", "settings"),
    [
        ("names", (2, 2), (("strategy", "shard_grad_op"),)),
        pytest.param("flattened", (2, 2), (), marks=pytest.mark.nightly),
        pytest.param("replicas", (2, 2), (), marks=pytest.mark.nightly),
        pytest.param("copies along cp", (2, 2), (), marks=pytest.mark.nightly),
        ("fully_shard", (2, 2), ()),
        pytest.param("fully_shard with replicas", (2, 2), (), marks=pytest.mark.nightly),
        pytest.param("fsdp", (2, 2), (), marks=pytest.mark.nightly),
        # Beside tensor parallelism, whose ranks see the same part.
        pytest.param("names", (1, 2, 2), (), marks=pytest.mark.nightly),
        ("flattened", (1, 2, 2), ()),
        pytest.param("fully_shard", (1, 2, 2), (), marks=pytest.mark.nightly),
    ],
)
def test_parts_of_sequences_train_as_whole_ones(way: str, sizes: tuple[int, ...], settings: tuple[Any, ...]) -> None:
    ranks = run(4, train, way, sizes, "cpu", torch.float64, settings)
    assert_as_whole(ranks, sizes[0], torch.float64, 1e-12)


def without_cp(rank: int) -> str:
    mesh = mesh_of((2, 2), ("dp", "cp"), "cpu")
    model = seeded(Net)
    polyshard.shard(model, polyshard.ShardConfig(mesh=mesh, shard="dp", timeout_s=30.0))
    with pytest.raises(RankMismatchError) as caught:
        model(*(each.chunk(2, -1)[mesh["cp"].get_local_rank()] for each in sequences(0, 0, 0, torch.device("cpu"))))
    polyshard.close(model)
    return str(caught.value)


def test_a_dimension_that_is_not_sharded_over_is_refused() -> None:
    for text in run(4, without_cp):
        assert "argument 0 of 'Net' differs" in text
        assert "(context parallelism), shard over their dimension too: shard=('dp', 'cp')" in text


#: By number of ranks.
SIZES = {2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)], 4: [(1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4)]}


def drawn(seed: int) -> Plan:
    """A plan of 2, 4 or, rarely, 8 ranks."""
    pick = random.Random(seed)
    ranks = pick.choice([2, 4, 4, 4, 8])
    replicas, shards, parts = (2, 2, 2) if ranks == 8 else pick.choice(SIZES[ranks])
    settings: list[tuple[str, Any]] = [("offload", pick.choice(["none", "none", "cpu", "optimizer"]))]
    settings.append(("batch_nbytes", pick.choice([0, 4096, "128 MiB"])))
    hybrid = replicas > 1 or pick.random() < 0.3
    if hybrid:
        joins = ["hfsdp", "hpz"] if shards > 1 else []
        settings.append(("strategy", pick.choice(["hybrid_shard", "hybrid_shard_zero2", *joins])))
    else:
        settings.append(("strategy", pick.choice(["full_shard", "shard_grad_op", "zero1"])))
    more: dict[str, Any] = {"replicate": ("dp_replicate",) if hybrid else (), "microbatches": pick.choice([1, 1, 2])}
    blocks, tied = pick.choice([1, 2, 3]), pick.random() < 0.3
    more |= _steps(random.Random(f"steps {seed}"), settings)
    recomputed = random.Random(f"recomputed {seed}").random() < 0.3
    of_all: dict[str, Any] = {"tied": tied, "blocks": blocks, "recomputed": recomputed}
    if pick.random() < 0.5:
        shape = Shape(sequence=pick.random() < 0.5, hidden=pick.choice([8, 10, 13]), **of_all)
        return Plan((replicas, shards, parts), ("dp_replicate", "dp_shard", "tp"), shape, ("dp_shard",), **more)
    kept = pick.choice(["grouped", "dtensor", "modules"])
    experts = pick.choice([3, 5, 6]) if kept == "dtensor" else 4
    closed = tuple(pick.sample(range(experts), pick.choice([0, 1])))
    shape = Shape(experts=experts, kept=kept, closed=closed, **of_all)
    names = ("dp_replicate", "edp", "ep")
    divisor = pick.choice([None, "data", "group", "sum", 6.0])
    return Plan((replicas, shards, parts), names, shape, ("edp", "ep"), experts=("edp",), divisor=divisor, **more)


def _steps(pick: random.Random, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    """What comes behind the first step, and whether a budget chooses which blocks stay gathered."""
    if pick.random() < 0.3 and dict(settings)["strategy"] in ("full_shard", "hybrid_shard"):
        settings = [*settings, ("reshard_after_forward", "auto"), ("memory_budget", "1 GiB")]
    optimizer = pick.choice(["adamw", "flat", "muon"])
    return {"settings": tuple(settings), "optimizer": optimizer, "steps": pick.choice([0, 2])}


#: What `make test` runs.
SEEDS = [4, 8, 23, 36, 41, 68, 75, 78, 85, 93]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step(seed: int) -> None:
    assert_trains(drawn(seed))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", sorted({*range(100)} - {*SEEDS}))
def test_a_step_of_many(seed: int) -> None:
    assert_trains(drawn(seed))


@pytest.mark.slow
def test_a_policy_may_give_experts_a_mesh() -> None:
    """Of replicas and shards, which are others than those of all else."""
    experts: dict[str, Any] = {"shape": Shape(experts=3, kept="dtensor"), "by_mesh": ("dp_replicate", "edp")}
    names, shard = ("dp_replicate", "edp", "ep"), ("edp", "ep")
    assert_trains(Plan((2, 1, 2), names, shard=shard, replicate=("dp_replicate",), **experts))
