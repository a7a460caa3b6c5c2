"""Who orthogonalises what, and what travels for it: balance, rounds, and bytes counted by collectives that record."""

from __future__ import annotations

import itertools
from typing import Any

import polyshard
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import Cell, Zoo, zoo_step
from parity import Block, fake, local, seeded, units_of
from polyshard.optim import Muon, for_matrices
from polyshard.optim.plan import owners_of
from polyshard_backends.fake import FakeCall
from torch import nn


def loads_of(works: list[int], owners: list[int], count: int) -> list[int]:
    loads = [0] * count
    for work, owner in zip(works, owners, strict=True):
        loads[owner] += work
    return loads


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 3))
def test_the_longest_load_is_near_the_least_possible(works: list[int], count: int) -> None:
    longest = max(loads_of(works, owners_of(works, count), count))
    least = min(
        max(loads_of(works, list(owners), count)) for owners in itertools.product(range(count), repeat=len(works))
    )
    assert longest * 3 * count <= least * (4 * count - 1)


class Wide(nn.Module):
    """Matrices of several shapes, some of one row fewer than ranks, some of an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16, 40) for _ in range(6))
        self.odd = nn.Linear(16, 63, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.odd(x)


def step_of(
    rank: int, world_size: int, dtype: torch.dtype, **settings: Any
) -> tuple[list[FakeCall], list[tuple[int, int]]]:
    """What one rank issued in the second optimizer step, and of each matrix the elements: of all, and of its piece."""
    collectives = fake(rank, world_size)
    model = polyshard.shard(
        seeded(Wide).float(), polyshard.ShardConfig(collectives=collectives, policy=units_of(Block), **settings)
    )
    matrices = for_matrices(model).matrices
    muon = Muon(matrices, dtype=dtype)
    x = torch.randn(4, 16)
    for _ in range(2):
        model(x).square().mean().backward()
        collectives.calls.clear()
        muon.step()
        model.zero_grad()
    return list(collectives.calls), [(each.numel(), local(each).numel()) for each in matrices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.bfloat16),
        (8, torch.float32),
        pytest.param(64, torch.bfloat16, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_an_element_of_a_matrix_travels_to_its_owner_and_back(world_size: int, dtype: torch.dtype) -> None:
    sent, pieces = 0, []
    for rank in range(world_size):
        calls, sizes = step_of(rank, world_size, dtype)
        assert {call.operation for call in calls} == {"all_to_all"}
        assert {call.dtype for call in calls} == {dtype}
        sent += sum(call.sent_nbytes for call in calls)
        pieces.append(sizes)
    numel = sum(whole for whole, _ in pieces[0])
    # At best every owner is who has most of it already.
    spared = sum(max(piece for _, piece in of_ranks) for of_ranks in zip(*pieces, strict=True))
    # Over all ranks: at most 4 bytes an element and step in bf16.
    assert 2 * dtype.itemsize * (numel - spared) <= sent <= 2 * dtype.itemsize * numel


def test_unsharded_matrices_are_orthogonalised_once_and_gathered() -> None:
    calls, _ = step_of(0, 4, torch.bfloat16, strategy="no_shard")
    assert {call.operation for call in calls} == {"all_gather"}


def test_the_record_of_a_step_of_every_kind_of_matrix() -> None:
    """The same count as above, of matrices of one row, of one column, tied and without a gradient."""
    sent = 0
    for rank in range(4):
        collectives = fake(rank, 4)
        model = polyshard.shard(seeded(Zoo), polyshard.ShardConfig(collectives=collectives, policy=units_of(Cell)))
        matrices = for_matrices(model).matrices
        zoo_step(model, 0, rank)
        collectives.calls.clear()
        Muon(matrices).step()
        sent += sum(call.sent_nbytes for call in collectives.calls)
        numel = sum(parameter.numel() for parameter in matrices)
    assert 0 < sent <= 4 * numel
