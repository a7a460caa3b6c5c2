"""Real processes over gloo: parity with the unsharded model, groups and meshes, and ranks that disagree or fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import polyshard
import pytest
import torch
import torch.distributed as dist
from parity import Block, Net, adam, assert_all_close, root_of, seeded, square_step, train_reference, units_of, whole
from polyshard import ShardConfig
from polyshard.errors import ParameterError, PluginNotFoundError, PolyshardError, RankMismatchError
from polyshard.interfaces import PluginContext
from polyshard_backends.gloo import GlooCollectives
from processes import RankPool
from torch import nn

pytestmark = pytest.mark.slow

T = TypeVar("T")

BLOCKS = {"policy": units_of(Block)}
#: Far above what anything here takes, and far below the time after which a run is given up.
TIMEOUT_S = 30.0
RANKS = 3


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    """Started once for all tests: starting them is what takes time."""
    with RankPool(RANKS) as pool:
        yield pool


def run(pool: RankPool, function: Callable[..., T], *args: Any) -> list[T]:
    """A rank that waits for ``TIMEOUT_S`` fails the test: this gives up before."""
    return pool.run(function, *args, timeout=TIMEOUT_S / 2)


def trained(config: ShardConfig, rank: int, turns: int = 5) -> dict[str, torch.Tensor]:
    """Whole parameters after AdamW steps on ``rank``'s inputs."""
    model = polyshard.shard(seeded(Net), config)
    optimizer = adam(model)
    for turn in range(turns):
        square_step(model, turn, rank)
        assert root_of(model).gathered == ()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def assert_trained(ranks: list[dict[str, torch.Tensor] | None], world_size: int) -> None:
    expected = train_reference(seeded(Net), square_step, world_size, 5, adam).parameters
    took_part = [parameters for parameters in ranks if parameters is not None]
    assert len(took_part) == world_size
    assert_all_close(took_part, expected)


# Who takes part.


def train_in(rank: int, form: str) -> dict[str, torch.Tensor] | None:
    world = dist.get_world_size()
    settings: dict[str, Any] = {}
    if form == "mesh":
        settings["mesh"] = dist.device_mesh.init_device_mesh("cpu", (world,))
    elif form == "mesh as collectives":
        settings["collectives"] = dist.device_mesh.init_device_mesh("cpu", (world,))
    elif form == "group":
        settings["collectives"] = dist.group.WORLD
    elif form == "subgroup":
        pair = dist.new_group([0, 2])
        if rank == 1:
            return None
        return trained(ShardConfig(collectives=pair, timeout_s=TIMEOUT_S, **BLOCKS), dist.get_rank(pair))
    elif form in ("1x3", "3x1"):
        shape = (1, 3) if form == "1x3" else (3, 1)
        settings["mesh"] = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        settings["strategy"] = "hybrid_shard"
    return trained(ShardConfig(timeout_s=TIMEOUT_S, **BLOCKS, **settings), rank)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["default", "mesh", "mesh as collectives", "group", "1x3", "3x1"])
def test_groups_and_meshes_are_taken_as_they_are(processes: RankPool, form: str) -> None:
    assert_trained(run(processes, train_in, form), RANKS)


def test_ranks_of_a_subgroup_train_without_the_others(processes: RankPool) -> None:
    ranks = run(processes, train_in, "subgroup")
    assert ranks[1] is None
    assert_trained(ranks, 2)


# Ranks that disagree.


class Counting(GlooCollectives):
    """Counts what is sent."""

    sent = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            self.sent += 1
        return super().__getattribute__(name)


def counting(timeout_s: float = TIMEOUT_S) -> Counting:
    return Counting(PluginContext("counting", torch.device("cpu"), timeout=timedelta(seconds=timeout_s)))


def refused(model: nn.Module, settings: dict[str, Any]) -> tuple[type[BaseException], str]:
    """The error that sharding raises here, after which nothing was sent and the model is as it was."""
    collectives = counting()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(PolyshardError) as caught:
        polyshard.shard(model, ShardConfig(**{"collectives": collectives, "timeout_s": TIMEOUT_S, **settings}))
    assert collectives.sent == 0
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    return type(caught.value), str(caught.value)


def shard_with(rank: int, by_rank: list[dict[str, Any]]) -> tuple[type[BaseException], str]:
    return refused(seeded(Net), by_rank[rank])


def test_a_plugin_that_one_rank_does_not_have_stops_all(processes: RankPool) -> None:
    ranks = run(processes, shard_with, [{}, {}, {"precision": "bf61"}])
    assert [kind for kind, _ in ranks] == [RankMismatchError, RankMismatchError, PluginNotFoundError]
    for _, text in ranks:
        assert "'bf61'" in text
    assert "rank 2" in ranks[0][1]


def test_a_backend_that_one_rank_does_not_have_stops_all(processes: RankPool) -> None:
    # That rank has no collectives to tell the others through.
    ranks = run(processes, shard_with, [{"collectives": "gloo"}, {"collectives": "golo"}, {"collectives": "gloo"}])
    assert [kind for kind, _ in ranks] == [RankMismatchError, PluginNotFoundError, RankMismatchError]
    for _, text in ranks:
        assert "'golo'" in text
        assert "Did you mean 'gloo'" in text


class Odd(torch.Tensor):
    """A tensor of which nobody knows how it is cut."""


def shard_odd(rank: int) -> tuple[type[BaseException], str]:
    model = seeded(Net)
    if rank == 0:
        model.register_parameter("odd", nn.Parameter(torch.eye(2).as_subclass(Odd), requires_grad=False))
    return refused(model, {})


def test_a_parameter_that_cannot_be_sharded_on_one_rank_stops_all(processes: RankPool) -> None:
    ranks = run(processes, shard_odd)
    assert [kind for kind, _ in ranks] == [ParameterError, RankMismatchError, RankMismatchError]
    assert all("'odd' on rank 0" in text for _, text in ranks)


# Ranks that fail.


def shard_late(rank: int) -> str:
    group = dist.new_group(list(range(RANKS)))
    if rank == 1:
        return ""
    with pytest.raises(RankMismatchError) as caught:
        polyshard.shard(seeded(Net), ShardConfig(collectives=group, timeout_s=1.0))
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_never_shards_is_named(processes: RankPool) -> None:
    texts = run(processes, shard_late)
    for rank in (0, 2):
        assert re.search(r"Ranks \[1\] did not come to shard their model within 1 s, rank [02] waited", texts[rank])
