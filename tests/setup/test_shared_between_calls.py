"""A parameter that an earlier call has cut is not cut again by another."""

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
