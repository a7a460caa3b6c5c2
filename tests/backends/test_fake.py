"""The fake backend: one rank of a pretended world, of any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
import torch
from polyshard.errors import ConfigError, WorldSizeError
from polyshard.interfaces import Collectives, PluginContext, ReduceOp
from polyshard_backends.auto import auto
from polyshard_backends.fake import CALLS_KEPT, FakeCollectives
from polyshard_testing import CollectivesSuite, plugin_context

T = TypeVar("T")
CPU = PluginContext("fake", torch.device("cpu"))


@dataclass(frozen=True)
class RankOf:
    """The least that a user may give in place of a process group."""

    own_rank: int
    world: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.world


class TestConformance(CollectivesSuite):
    world_sizes = (1, 2, 3, 8)

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        return [fn(FakeCollectives(CPU, rank=rank, world_size=world_size)) for rank in range(world_size)]


def test_calls_are_recorded_in_order_and_bounded() -> None:
    fake = FakeCollectives(CPU, rank=1, world_size=4)
    out = torch.zeros(8, dtype=torch.bfloat16)
    fake.all_gather(out, out[2:4])
    fake.reduce_scatter(torch.zeros(2), out, op=ReduceOp.MEAN)
    fake.all_reduce(torch.zeros(5), op=ReduceOp.SUM)
    assert list(fake.calls) == [
        ("all_gather", 8, torch.bfloat16, 6),
        ("reduce_scatter", 8, torch.bfloat16, 6),
        ("all_reduce", 5, torch.float32, 7),
    ]
    for _ in range(CALLS_KEPT):
        fake.broadcast(out, 0)
    assert len(fake.calls) == CALLS_KEPT
    assert fake.calls[0] == ("broadcast", 8, torch.bfloat16, 0)


def test_bytes_that_would_be_sent_leave_out_what_stays() -> None:
    fake = FakeCollectives(CPU, rank=1, world_size=3)
    fake.all_to_all(torch.zeros(4, dtype=torch.float64), [1, 2, 1], torch.zeros(10, dtype=torch.float64), [3, 2, 5])
    fake.broadcast(torch.zeros(6, dtype=torch.int16), 1)
    part = fake.partition([[0], [2, 1]])
    part.all_to_all(torch.zeros(6), [0, 6], torch.zeros(10), [4, 6])
    assert list(fake.calls) == [("all_to_all", 10, torch.float64, 8), ("broadcast", 6, torch.int16, 12)]
    assert [call.sent_nbytes for call in fake.calls] == [64, 24]
    assert [call.sent_nbytes for call in part.calls] == [16]


@pytest.mark.parametrize(
    ("out_splits", "expected"),
    [([2, 2, 2], [4.0, 5.0, 4.0, 5.0, 4.0, 5.0]), ([3, 2, 0], [0.0, 0.0, 0.0, 4.0, 5.0])],
    ids=["alike", "uneven"],
)
def test_an_exchange_brings_the_own_block_and_nothing_that_nobody_sent(
    out_splits: list[int], expected: list[float]
) -> None:
    fake = FakeCollectives(CPU, rank=1, world_size=3)
    out = torch.full((sum(out_splits),), 9.0)
    fake.all_to_all(out, out_splits, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), [3, 2, 1]).wait()
    assert out.tolist() == expected


def test_rank_and_size_come_from_the_users_object_unless_given() -> None:
    context = PluginContext("fake", torch.device("cpu"), process_group=RankOf(5, 16))
    taken = FakeCollectives(context)
    given = FakeCollectives(context, rank=0, world_size=2)
    assert (taken.rank, taken.world_size) == (5, 16)
    assert (given.rank, given.world_size) == (0, 2)


def test_auto_serves_the_users_object_with_the_fake_backend() -> None:
    chosen = auto(replace(plugin_context(), process_group=RankOf(5, 16)))
    assert isinstance(chosen, FakeCollectives)
    assert (chosen.rank, chosen.world_size) == (5, 16)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0, 10**11)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(WorldSizeError, match=f"rank {rank} of {world_size} does not exist"):
        FakeCollectives(CPU, rank=rank, world_size=world_size)


def test_an_option_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="world_size is '8'; give an integer"):
        FakeCollectives(CPU, rank=0, world_size="8")  # type: ignore[arg-type]
