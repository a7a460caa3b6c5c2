"""Units inside units, shared modules and parameters, buffers: against the unsharded model."""

from __future__ import annotations

import copy
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_all_close,
    assert_observed,
    assert_parity,
    draw,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    threaded,
    train_reference,
    units_of,
    warns_for,
)
from polyshard.errors import ConfigError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


@pytest.mark.parametrize("policy", [units_of(Block), "always", "never"])
def test_one_module_in_two_places(policy: Any) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = Block(3)
            self.left = nn.Sequential(nn.Linear(3, 3), shared)
            self.right = nn.Sequential(shared, nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) * self.right(x)

    assert_parity(seeded(Root), settings={"policy": policy}, optimizer=adam)


def test_buffers_are_each_rank_s_own_and_follow_batch_statistics() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x))

    model = seeded(Normed)
    assert_parity(model, settings={"policy": units_of(Block, nn.BatchNorm1d)})

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Block))
        square_step(mine, 0, rank)
        return dict(mine.named_buffers())

    for rank, buffers in enumerate(on_ranks(2, on_rank)):
        expected = copy.deepcopy(model)
        square_step(expected, 0, rank)
        torch.testing.assert_close(buffers, dict(expected.named_buffers()), rtol=1e-12, atol=1e-12)


class Generator(Net):
    """Has further methods that compute."""

    def generate(self, x: torch.Tensor, *, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self(x) @ self.last.weight[:, :3])
        return x

    def penalty(self) -> torch.Tensor:
        return self.first.weight.square().sum() + self.last.weight.abs().sum()


@one_by_one("strategy", STRATEGIES, "world_size", [3, 1])
def test_a_registered_method_sees_whole_parameters(world_size: int, strategy: str) -> None:
    model = seeded(Generator)
    with torch.no_grad():
        expected = model.generate(draw(4, 3), steps=3)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        mine = sharded_copy(model, rank, world, policy=units_of(Block), strategy=strategy)
        if world_size > 1:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                mine.generate(draw(4, 3), steps=3)
        polyshard.register_forward_method(mine, "generate")
        with torch.no_grad():
            generated = mine.generate(draw(4, 3), steps=3)
        assert root_of(mine).gathered == ()
        square_step(mine, 0, rank)
        return generated

    with warns_for(world_size, {"strategy": strategy}):
        assert_all_close(on_ranks(world_size, on_rank), expected)


def test_a_registered_method_trains_with_the_forward() -> None:
    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        polyshard.shard(model, config)
        polyshard.register_forward_method(model, "penalty")
        return model

    step = stepping(lambda model, x, turn, rank: model(x).square().mean() + 0.1 * model.penalty(), grad=False)

    assert_parity(seeded(Generator), step, settings={"policy": units_of(Block)}, wrap=wrap)


def test_registering_what_cannot_compute_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(Generator), rank, world, policy=units_of(Block))
        with pytest.raises(ConfigError, match="does not have a method penalties"):
            polyshard.register_forward_method(mine, "penalties")
        with pytest.raises(StateError, match="needs a sharded module"):
            polyshard.register_forward_method(mine.first, "forward")

    on_ranks(2, on_rank)


def test_a_composed_block_may_be_used_before_it_joins_a_root() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        config = threaded(world, rank)
        for block in mine.blocks:
            polyshard.fully_shard(block, config)
        mine.blocks[0](draw(4, 5)).sum().backward()
        mine.blocks[0].zero_grad()
        polyshard.fully_shard(mine, config)
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))
