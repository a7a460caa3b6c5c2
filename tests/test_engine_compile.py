"""torch.compile around the sharded model, and inside it."""

from __future__ import annotations

from collections.abc import Iterator

import polyshard
import pytest
import torch
from parity import Block, Net, assert_parity, seeded, square_step, units_of
from torch import nn

# The compiler silences this one itself, by warnings.catch_warnings, which threads undo for each other.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_compile_around_the_sharded_model(strategy: str) -> None:
    compiled: dict[nn.Module, nn.Module] = {}

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if "_polyshard_stage" not in model.__dict__:
            return square_step(model, turn, rank)
        if model not in compiled:
            compiled[model] = torch.compile(model, backend="eager")
        return square_step(compiled[model], turn, rank)

    assert_parity(seeded(Net), step, world_size=2, settings={"policy": units_of(Block), "strategy": strategy})


def test_compiled_blocks_inside_the_sharded_model() -> None:
    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        polyshard.shard(model, config)
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    assert_parity(seeded(Net), world_size=2, wrap=wrap, settings={"policy": units_of(Block)})


def test_blocks_compiled_before_sharding() -> None:
    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        for block in model.blocks:
            block.up.compile(backend="eager")
        return polyshard.shard(model, config)

    assert_parity(seeded(Net), world_size=2, wrap=wrap, settings={"policy": units_of(Block)})
