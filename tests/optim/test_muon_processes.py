"""Muon on ranks that are processes over gloo, and what a failure on one of them means for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from matrices import TURNS, Cell, Zoo, exact, most_apart, reference_zoo, whole_parameters, zoo_step
from parity import seeded, units_of
from polyshard.errors import CollectiveError, RankMismatchError
from polyshard.optim import Muon, for_matrices
from processes import KeptRanks
from torch import nn

pytestmark = pytest.mark.slow

RANKS = KeptRanks()
TIMEOUT_S = 30.0


def sharded(settings: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> nn.Module:
    config = polyshard.ShardConfig(collectives=dist.new_group(), policy=units_of(Cell), timeout_s=timeout_s, **settings)
    return polyshard.shard(seeded(Zoo), config)


def train(rank: int, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    model = sharded(settings)
    optimizer = exact(model)
    for turn in range(TURNS):
        zoo_step(model, turn, rank)
        optimizer.step()
        optimizer.zero_grad()
    whole = whole_parameters(model)
    polyshard.close(model)
    return whole


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "settings",
    [
        {"layout": "rows"},
        {"layout": {"name": "blocks", "size": 4, "smallest": 1}, "strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
        {"strategy": "hybrid_shard", "shard_size": 1, "layout": "rows"},
        {"offload": "cpu"},
    ],
    ids=str,
)
def test_steps_in_fp64_equal_the_formula(settings: dict[str, Any], ranks: int) -> None:
    expected = reference_zoo(ranks, exact)
    for trained in RANKS.run(ranks, train, settings):
        assert most_apart(trained, expected) < 1e-11


def replicas_of_shards(rank: int) -> dict[str, torch.Tensor]:
    return train(rank, {"strategy": "hybrid_shard", "shard_size": 2, "layout": "rows"})


@pytest.mark.slow
def test_two_replicas_of_two_shards() -> None:
    expected = reference_zoo(4, exact)
    for trained in RANKS.run(4, replicas_of_shards):
        assert most_apart(trained, expected) < 1e-11


def given_others(rank: int) -> tuple[str, float]:
    """The error of matrices in another order on rank 1, and the loss of a step behind it."""
    model = sharded({})
    matrices = for_matrices(model).matrices
    zoo_step(model, 0, 0)
    with pytest.raises(RankMismatchError) as caught:
        Muon(matrices[::-1] if rank == 1 else matrices).step()
    Muon(matrices).step()
    (loss,) = zoo_step(model, 1, 0)
    polyshard.close(model)
    return str(caught.value), loss.item()


def test_other_matrices_on_one_rank_are_refused_by_all_before_any_changed() -> None:
    (_, first), (message, second) = RANKS.run(2, given_others)
    assert "Muon was given other parameters, or in another order, on some ranks" in message
    assert first == second


class Failing(Muon):
    """Raises on rank 1, in the middle of its tensors."""

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("of rank 1")
        return super().transform(group, wholes, states)


def failing(rank: int, timeout_s: float) -> str:
    """The error of a step of which rank 1 gives up; its process lives on."""
    model = sharded({}, timeout_s)
    zoo_step(model, 0, rank)
    with pytest.raises((ArithmeticError, CollectiveError)) as caught:
        Failing(for_matrices(model).matrices).step()
    return type(caught.value).__name__


@pytest.mark.slow
def test_ranks_wait_for_one_that_raised_until_the_timeout() -> None:
    assert RANKS.run(2, failing, 3.0, timeout=20.0) == ["CollectiveTimeoutError", "ArithmeticError"]
