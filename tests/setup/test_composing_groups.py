"""Modules composed inside out whose ranks differ: each keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import assert_parity, local, on_ranks, seeded, stepping, threaded
from polyshard import ShardConfig
from polyshard.errors import AlreadyShardedError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


def fake(world_size: int, **settings: Any) -> polyshard.ShardConfig:
    return polyshard.ShardConfig(collectives={"name": "fake", "world_size": world_size}, **settings)


def local_elements(module: nn.Module) -> int:
    return sum(local(parameter).numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (fake(4), fake(8)),
        (fake(8, strategy="hybrid_shard", shard_size=2), fake(8, strategy="hybrid_shard", shard_size=4)),
        (fake(8, strategy="no_shard"), fake(8)),
    ],
)
def test_an_inner_module_over_other_ranks_trains(inner: polyshard.ShardConfig, outer: polyshard.ShardConfig) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    polyshard.fully_shard(model[0], inner)
    kept = local_elements(model[0])
    polyshard.fully_shard(model, outer)
    assert local_elements(model[0]) == kept
    assert local_elements(model[1]) != kept
    before = [local(parameter.detach()).clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(local(now), then) for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(("batch_nbytes", "beyond"), [(0, 0), (64 * 64 * 4, 0), (64 * 64 * 4 * 3, 2), ("16 MiB", 5)])
def test_the_report_counts_as_many_units_as_are_prefetched(ahead: int, batch_nbytes: int | str, beyond: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    policy = {"name": "module_class", "classes": nn.Linear}
    settings: dict[str, Any] = {"forward_prefetch": ahead, "backward_prefetch": 0, "batch_nbytes": batch_nbytes}
    polyshard.shard(model, fake(4, policy=policy, **settings))
    # Where nothing is prefetched, there are no batches; elsewhere two of them are there at once. There are six units.
    units = min(6, max(1 + ahead + beyond, 2 * (1 + beyond))) if ahead else 1
    assert polyshard.report(model).gathered_nbytes == units * 64 * 64 * 4


def test_the_report_counts_reductions_as_wide_as_they_travel() -> None:
    # Nothing is scattered without shards: what is all-reduced is fp32, two reductions at once.
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    policy = {"name": "module_class", "classes": nn.Linear}
    polyshard.shard(model, fake(4, policy=policy, strategy="no_shard", precision="bf16"))
    assert polyshard.report(model).reduction_nbytes == 2 * 64 * 64 * 4


# A parameter that an earlier call has cut is not cut again by another.

CALLS = [polyshard.shard, polyshard.fully_shard]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(18, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 18)
        self.head.weight = self.body[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens))


@pytest.mark.parametrize("first", CALLS)
@pytest.mark.parametrize("second", CALLS)
def test_two_modules_that_share_a_weight(first: Callable[..., nn.Module], second: Callable[..., nn.Module]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            model = seeded(Tied)
        config = threaded(world, rank)
        first(model.body, config)
        before = {name: (parameter, local(parameter).clone()) for name, parameter in model.named_parameters()}
        words = rf"'weight' of this Linear is sharded already, as '0\.weight' of a module that .* \(rank {rank}\)\. "
        with pytest.raises(AlreadyShardedError, match=words + ".* on the module that contains both"):
            second(model.head, config)
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0]
            assert torch.equal(local(parameter), before[name][1])
        assert not model.head._forward_hooks
        # Nor is the model that contains both.
        words = r"'head\.weight' of this Tied is sharded already, as '0\.weight' of a module that shares it"
        with pytest.raises(AlreadyShardedError, match=words):
            polyshard.fully_shard(model, config)
        return list(model.body(torch.arange(18)).detach())

    expected = list(seeded(Tied).body(torch.arange(18)).detach())
    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, expected)


def test_the_others_of_that_module_can_be_sharded_without_it() -> None:
    config = ShardConfig(collectives={"name": "fake", "world_size": 2})
    model = seeded(Tied)
    polyshard.fully_shard(model.body, config)
    polyshard.fully_shard(model.head, config, ignored_parameters=[model.head.weight])
    assert local(model.head.bias).shape == (9,)


@pytest.mark.parametrize("policy", ["never", {"name": "module_class", "classes": nn.Embedding}])
def test_a_module_inside_of_one_that_is_sharded(policy: Any) -> None:
    model = seeded(Tied)
    config = ShardConfig(collectives={"name": "fake", "world_size": 2})
    polyshard.shard(model, ShardConfig(collectives={"name": "fake", "world_size": 2}, policy=policy))
    sizes = [local(parameter).numel() for parameter in model.parameters()]
    with pytest.raises(
        AlreadyShardedError, match=r"'weight' .* as 'body\.1\.weight' of Tied, which contains this .*out"
    ):
        polyshard.fully_shard(model.body[1], config)
    assert [local(parameter).numel() for parameter in model.parameters()] == sizes
    assert model(torch.arange(3)).shape == (3, 18)


def test_from_the_inside_out_around_all_uses() -> None:
    def wrap(model: nn.Module, config: ShardConfig) -> nn.Module:
        polyshard.fully_shard(model.body[1], config)
        return polyshard.fully_shard(model, config)

    step = stepping(lambda model, x, turn, rank: model((x * 100).long() % 18).square().mean(), 4, grad=False)

    assert_parity(seeded(Tied), step, 2, wrap=wrap)
