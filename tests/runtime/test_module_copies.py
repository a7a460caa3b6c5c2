"""Copies of modules that hold pieces: refused, not made of pieces."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, square_step, units_of
from polyshard import ShardConfig
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


def saved(module: nn.Module) -> None:
    torch.save(module, io.BytesIO())


def sharded(**settings: Any) -> nn.Module:
    collectives = {"name": "fake", "world_size": 2}
    return polyshard.shard(seeded(Net), ShardConfig(collectives=collectives, policy=units_of(Block), **settings))


@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize(
    ("done", "how"), [(copy.deepcopy, "deep-copied"), (pickle.dumps, "pickled"), (saved, "pickled")]
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_module_inside_of_a_unit(done: Callable[[nn.Module], object], how: str, steps: int, layout: str) -> None:
    model = sharded(layout=layout)
    for turn in range(steps):
        square_step(model, turn, 0)
    with pytest.raises(StateError, match=rf"a piece of 'last\.weight' cannot be {how} \(rank 0\)"):
        done(model.last)
    with pytest.raises(StateError, match=r"'blocks\.1\.up\.weight'"):
        done(model.blocks[1].up)
    with pytest.raises(StateError, match=r"A sharded module cannot be"):
        done(model.blocks)
    square_step(model, steps, 0)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_what_is_whole_is_copied(strategy: str) -> None:
    x = draw(2, 3)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), layout="rows", strategy=strategy)
        with polyshard.unsharded(model):
            copies = [copy.deepcopy(model.first), pickle.loads(pickle.dumps(model.first))]
        if strategy == "no_shard":
            copies.append(copy.deepcopy(model.first))
        else:
            with pytest.raises(StateError, match=r"first\.weight"):
                copy.deepcopy(model.first)
        # A copy belongs to no sharded model.
        copies += [copy.deepcopy(each) for each in copies]
        return [each(x) for each in copies]

    expected = seeded(Net).first(x)
    for found in on_ranks(2, on_rank):
        for each in found:
            torch.testing.assert_close(each, expected)


def test_a_module_without_parameters_and_a_parameter_are_copied_as_before() -> None:
    model = polyshard.shard(
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), ShardConfig(collectives={"name": "fake", "world_size": 2})
    )
    assert copy.deepcopy(model[1]).p == 0.5
    assert torch.equal(copy.deepcopy(model[0].weight), model[0].weight)
