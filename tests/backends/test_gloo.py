"""The gloo backend, between real processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from polyshard.errors import CollectiveError, CollectiveTimeoutError, DeviceError, StateError, WorldSizeError
from polyshard.interfaces import Collectives, PluginContext, ReduceOp
from polyshard_backends import _torch_private
from polyshard_backends.auto import auto
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.gloo import GlooCollectives
from polyshard_testing import CollectivesSuite, plugin_context
from processes import KeptRanks, run_processes

T = TypeVar("T")

pytestmark = pytest.mark.slow

#: Started once for each world size, for all of the conformance tests.
RANKS = KeptRanks()
#: Older versions of torch number the ranks of a group in ascending order only.
ANY_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def context(timeout_s: float = 20.0, group: Any = None, mesh: Any = None) -> PluginContext:
    return PluginContext("gloo", torch.device("cpu"), group, mesh, timedelta(seconds=timeout_s))


def on_gloo(rank: int, fn: Callable[[Collectives], T]) -> T:
    collectives = GlooCollectives(context())
    try:
        return fn(collectives)
    finally:
        collectives.close()


class TestConformance(CollectivesSuite):
    world_sizes = (2, 3)

    def run_ranks(self, world_size: int, fn: Callable[[Collectives], T]) -> list[T]:
        return RANKS.run(world_size, on_gloo, fn, timeout=30.0)

    def test_partition_numbers_ranks_by_their_list(self, world_size: int) -> None:
        if ANY_ORDER:
            super().test_partition_numbers_ranks_by_their_list(world_size)
        else:
            with pytest.raises(WorldSizeError, match="ascending order"):
                super().test_partition_numbers_ranks_by_their_list(world_size)


def gather_ranks(collectives: Collectives) -> list[float]:
    out = torch.empty(collectives.world_size)
    collectives.all_gather(out, torch.tensor([float(dist.get_rank())])).wait()
    return out.tolist()


def in_given_groups(rank: int) -> dict[str, Any]:
    """What the backend does with a subgroup, a mesh, and torch's fake group."""
    seen: dict[str, Any] = {}
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        collectives = GlooCollectives(context(group=pair))
        seen["subgroup"] = (collectives.rank, collectives.world_size, gather_ranks(collectives))
        part = collectives.partition([[1, 0]] if torch.__version__ >= "2.13" else [[0, 1]])
        seen["part of subgroup"] = sorted(gather_ranks(part))
        part.close()
    else:
        with pytest.raises(WorldSizeError, match="contains"):
            GlooCollectives(context(group=pair))
    dist.new_group([0])
    if rank in (0, 2):
        # Torch would name the new groups otherwise on rank 0, and each rank would wait for the other.
        with pytest.raises(StateError, match="different numbers of process groups"):
            GlooCollectives(context(group=pair)).partition([[0], [1]])
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    seen["mesh"] = gather_ranks(GlooCollectives(context(mesh=mesh)))
    chosen = auto(plugin_context())
    seen["auto"] = (type(chosen).__name__, gather_ranks(chosen))
    with pytest.raises(CollectiveError, match="the whole must have 6"):
        chosen.all_gather(torch.zeros(5), torch.zeros(2))
    with pytest.raises(CollectiveError, match=r"out has 3 elements and the splits \[1, 1, 2\]; give 3 splits"):
        chosen.all_to_all(torch.zeros(3), [1, 1, 2], torch.zeros(3), [1, 1, 1])
    chosen.close()
    seen["group after close"] = gather_ranks(GlooCollectives(context()))
    return seen


@pytest.mark.slow
def test_groups_and_meshes_say_who_takes_part() -> None:
    seen = run_processes(3, in_given_groups, timeout=30.0)
    assert seen[0]["subgroup"] == (0, 2, [0.0, 2.0])
    assert seen[2]["subgroup"] == (1, 2, [0.0, 2.0])
    assert seen[2]["part of subgroup"] == [0.0, 2.0]
    for rank in range(3):
        assert seen[rank]["mesh"] == [0.0, 1.0, 2.0]
        assert seen[rank]["auto"] == ("GlooCollectives", [0.0, 1.0, 2.0])
        assert seen[rank]["group after close"] == [0.0, 1.0, 2.0]


def make_and_close(rank: int) -> int:
    """Groups that end before anything travels in them, as of a model that fails while it is sharded."""
    collectives = GlooCollectives(context())
    for turn in range(30):
        collectives.partition([[0, 2], [1, 3]] if turn % 2 else [[0, 1], [2, 3]]).close()
    return len(gather_ranks(collectives))


@pytest.mark.slow
def test_a_group_may_end_as_soon_as_it_is_made() -> None:
    # Torch alone breaks off the connecting of slower ranks; how often depends on the machine's load.
    assert run_processes(4, make_and_close, timeout=60.0) == [4] * 4


def exchange_by_a_channel(rank: int) -> list[float]:
    """As ``nccl`` asks a process group for an exchange, here of a group that needs no GPU."""
    channel = _torch_private.Channel(dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    # Rank i sends i elements to rank 0, none to rank 1, and two to rank 2.
    in_splits, out_splits = [rank, 0, 2], [[0, 1, 2], [0, 0, 0], [2, 2, 2]][rank]
    out = torch.full((sum(out_splits),), -1.0)
    channel.exchange(out, out_splits, torch.arange(rank + 2.0) + 10 * rank, in_splits)
    return out.tolist()


@pytest.mark.slow
def test_a_channel_exchanges_uneven_blocks() -> None:
    received = run_processes(3, exchange_by_a_channel, timeout=30.0)
    assert received == [[10.0, 20.0, 21.0], [], [0.0, 1.0, 11.0, 12.0, 22.0, 23.0]]


def only_rank_0_reduces(rank: int) -> None:
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce on rank 0 did not end within 1 s"):
            GlooCollectives(context(timeout_s=1.0)).all_reduce(torch.ones(3), op=ReduceOp.SUM).wait()


@pytest.mark.slow
def test_a_rank_that_stays_away_is_a_timeout() -> None:
    run_processes(2, only_rank_0_reduces, timeout=30.0)


def in_torchs_fake_group(rank: int) -> tuple[str, int, int]:
    # Importing it is what makes torch know the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=16)
    chosen = auto(plugin_context())
    assert isinstance(chosen, FakeCollectives)
    return type(chosen).__name__, chosen.rank, chosen.world_size


def test_auto_recognises_torchs_fake_group() -> None:
    assert run_processes(1, in_torchs_fake_group, timeout=30.0) == [("FakeCollectives", 3, 16)]


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(StateError, match="torchrun"):
        GlooCollectives(context())
    with pytest.raises(StateError, match=r"'gloo' needs torch\.distributed.*set collectives=\"fake\""):
        auto(plugin_context())
    with pytest.raises(DeviceError, match="knows backends for the CPU and CUDA, and the model computes on meta"):
        auto(plugin_context(device="meta"))


def test_another_device_is_refused() -> None:
    with pytest.raises(DeviceError, match="serves cpu tensors and the model computes on cuda:1"):
        GlooCollectives(PluginContext("gloo", torch.device("cuda", 1)))
