"""Sequences cut over a dimension ``cp`` train as whole sequences do, to 1e-12 in fp64. GPU twin: ``tests/gpu``."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from long_sequences import Net, assert_as_whole, sequences, train
from meshes import mesh_of, run
from parity import seeded
from polyshard.errors import RankMismatchError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("way", "sizes", "settings"),
    [
        ("names", (2, 2), (("strategy", "shard_grad_op"),)),
        pytest.param("flattened", (2, 2), (("layout", "rows"),), marks=pytest.mark.nightly),
        ("replicas", (2, 2), ()),
        pytest.param("copies along cp", (2, 2), (), marks=pytest.mark.nightly),
        ("fully_shard", (2, 2), ()),
        pytest.param("fully_shard with replicas", (2, 2), (), marks=pytest.mark.nightly),
        ("fsdp", (2, 2), ()),
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
