"""The group that FSDP was given, as the engine sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.ranks import Pools, Ranks
from polyshard.errors import UnsupportedError, WorldSizeError
from polyshard.interfaces import Collectives, ReduceOp
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp._collectives import collectives_of, predivide_factor
from polyshard_testing import CollectivesSuite


def on_group(ranks: Ranks, fn: Callable[[Collectives], T]) -> T:
    """``fn`` of the whole group's collectives."""
    return fn(collectives_of(ranks.group, ranks.device))


def count_replaced_calls(ranks: Ranks, name: str) -> int:
    """How often one operation of the engine calls what stands in ``torch.distributed`` for it at that moment."""
    collectives = collectives_of(ranks.group, ranks.device)
    seen: list[Any] = []
    newer = {"reduce_scatter_tensor": "reduce_scatter_single", "all_gather_into_tensor": "all_gather_single"}
    torchs = getattr(dist, newer.get(name, name), None) or getattr(dist, name)

    def replacement(*tensors: torch.Tensor, group: Any, **source: int) -> None:
        seen.append(tensors)
        torchs(*tensors, group=group, **source)

    whole = torch.arange(4.0, device=ranks.device)
    part = torch.full((2,), float(ranks.rank), device=ranks.device)
    with mock.patch.object(dist, name, replacement):
        if name == "reduce_scatter_tensor":
            collectives.reduce_scatter(part, whole, op=ReduceOp.MEAN).wait()
            assert part.tolist() == [2.0 * ranks.rank, 2.0 * ranks.rank + 1]
        elif name == "all_gather_into_tensor":
            collectives.all_gather(whole, part).wait()
            assert whole.tolist() == [0.0, 0.0, 1.0, 1.0]
        elif name == "all_reduce":
            collectives.all_reduce(part, op=ReduceOp.SUM).wait()
            assert part.tolist() == [1.0, 1.0]
        else:
            collectives.broadcast(part, 1).wait()
            assert part.tolist() == [1.0, 1.0]
    return len(seen)


def count_new_groups(ranks: Ranks) -> int:
    """How many groups are made by the construction and the first use of a group's collectives."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        collectives = collectives_of(ranks.group, ranks.device)
        collectives.barrier()
        collectives.all_gather_object(ranks.rank)
        collectives.all_reduce(torch.ones(1, device=ranks.device), op=ReduceOp.SUM).wait()
    return new_group.call_count


def mean_of_large_halves(ranks: Ranks) -> float:
    """The mean of 60000 on each of two ranks, in fp16."""
    tensor = torch.full((2,), 60000.0, dtype=torch.float16, device=ranks.device)
    part = torch.empty(1, dtype=torch.float16, device=ranks.device)
    collectives_of(ranks.group, ranks.device).reduce_scatter(part, tensor, op=ReduceOp.MEAN).wait()
    return part.item()


T = TypeVar("T")

CPU = torch.device("cpu")


class TestConformance(CollectivesSuite):
    """A process group keeps the contract, but that FSDP never divides the group that it was given."""

    world_sizes = (3,)
    # Nobody names it: FSDP constructs it.
    test_api_version_stands_in_the_class_itself_and_is_served = None
    test_factory_takes_a_context_and_options_by_name = None
    test_local_options_are_options_of_the_factory = None

    @pytest.fixture(autouse=True)
    def _pools(self, ranks: Pools) -> None:
        self.pools = ranks

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        return self.pools.run(world_size, on_group, fn)

    def test_partition_into_interleaved_parts(self, world_size: int) -> None:
        with pytest.raises(UnsupportedError, match="pair of process groups"):
            super().test_partition_into_interleaved_parts(world_size)

    def test_partition_numbers_ranks_by_their_list(self, world_size: int) -> None:
        with pytest.raises(UnsupportedError, match="pair of process groups"):
            super().test_partition_numbers_ranks_by_their_list(world_size)

    def test_closing_a_part_leaves_the_others(self, world_size: int) -> None:
        with pytest.raises(UnsupportedError, match="pair of process groups"):
            super().test_closing_a_part_leaves_the_others(world_size)

    def test_partition_refuses_lists_that_do_not_cover(self, world_size: int) -> None:
        with pytest.raises(NotImplementedError, match="cannot divide it"):
            super().test_partition_refuses_lists_that_do_not_cover(world_size)


@pytest.mark.parametrize(
    ("world_size", "factor"), [(1, 1), (2, 2), (3, 2), (4, 2), (6, 4), (8, 4), (12, 4), (16, 4), (64, 8)]
)
def test_gradients_are_divided_in_two_steps(world_size: int, factor: int) -> None:
    assert predivide_factor(world_size) == factor


@pytest.mark.parametrize("name", ["reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce", "broadcast"])
def test_a_replaced_function_of_torch_distributed_is_called(ranks: Pools, name: str) -> None:
    assert ranks.run(2, count_replaced_calls, name) == [1, 1]


def test_a_group_is_made_by_nobody(ranks: Pools) -> None:
    assert ranks.run(2, count_new_groups) == [0, 0]


def test_a_mean_of_half_precision_does_not_overflow(ranks: Pools) -> None:
    # Two addends of 60000 make 120000, beyond fp16's 65504; each divided by 2 first, they make 60000.
    assert ranks.run(2, mean_of_large_halves) == [60000.0, 60000.0]


def test_a_collectives_object_is_used_as_it_is() -> None:
    given = FakeCollectives.__new__(FakeCollectives)
    assert collectives_of(given, CPU) is given


def test_a_placeholder_for_a_group_of_others_is_refused() -> None:
    # torch.distributed.new_group returns this number on ranks that are not in the new group.
    with pytest.raises(WorldSizeError, match="-100 is not a process group that this process is in"):
        collectives_of(-100, CPU)
