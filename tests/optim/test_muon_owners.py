"""Who orthogonalises what, and what travels for it: balance, rounds, and bytes counted by collectives that record."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import polyshard
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import Cell, Zoo, zoo_step
from parity import Block, local, seeded, units_of
from polyshard.interfaces import PluginContext
from polyshard.optim import Muon, for_matrices
from polyshard.optim.plan import owners_of, rounds_of
from polyshard_backends.fake import FakeCall, FakeCollectives
from torch import nn

WORKS = st.lists(st.integers(1, 50), max_size=40)


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


@given(WORKS, st.integers(1, 4096))
def test_loads_of_any_number_of_owners(works: list[int], count: int) -> None:
    owners = owners_of(works, count)
    assert owners == owners_of(tuple(works), count)
    assert len(owners) == len(works)
    assert all(0 <= owner < count for owner in owners)
    loads = loads_of(works, owners, count)
    # Nobody has more than an even share and one tensor, and nobody is idle while another has two.
    assert max(loads) <= sum(works) / count + max(works, default=0)
    if len(works) >= count:
        assert min(loads) > 0


@given(WORKS, st.integers(1, 9), st.integers(1, 4), st.integers(1, 100))
def test_every_tensor_is_in_one_round_with_its_like(works: list[int], count: int, kinds: int, most: int) -> None:
    # Tensors of one kind have one size and one time.
    kind_of = [index % kinds for index in range(len(works))]
    numels = [10 * (kind + 1) for kind in kind_of]
    by_kind = [works[kind] for kind in kind_of]
    owners = owners_of(by_kind, count)
    rounds = rounds_of(owners, count, by_kind, kind_of, numels, most)
    assert rounds == rounds_of(owners, count, by_kind, kind_of, numels, most)
    found: Counter[int] = Counter()
    for batches in rounds:
        assert len(batches) == count
        assert any(batches)
        for owner, batch in enumerate(batches):
            found.update(batch)
            assert {owners[index] for index in batch} <= {owner}
            assert len({kind_of[index] for index in batch}) <= 1
            assert len(batch) <= 1 or sum(numels[index] for index in batch) <= most
    assert found == Counter(range(len(works)))
    for owner in range(count):
        order = [max(by_kind[index] for index in each[owner]) for each in rounds if each[owner]]
        assert order == sorted(order, reverse=True)


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
    collectives = FakeCollectives(PluginContext("fake", torch.device("cpu")), rank, world_size)
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
        collectives = FakeCollectives(PluginContext("fake", torch.device("cpu")), rank, 4)
        model = polyshard.shard(seeded(Zoo), polyshard.ShardConfig(collectives=collectives, policy=units_of(Cell)))
        matrices = for_matrices(model).matrices
        zoo_step(model, 0, rank)
        collectives.calls.clear()
        Muon(matrices).step()
        sent += sum(call.sent_nbytes for call in collectives.calls)
        numel = sum(parameter.numel() for parameter in matrices)
    assert 0 < sent <= 4 * numel
