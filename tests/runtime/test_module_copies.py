"""Copies of modules: of those inside of a unit with ``DTensor`` parameters, of whole ones plain, of sharded none."""

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
from torch.distributed.tensor import DTensor


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("copies", [copy.deepcopy, pickled, saved])
def test_a_module_inside_of_a_unit(copies: Callable[[nn.Module], Any], strategy: str) -> None:
    source = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(source, rank, world, policy=units_of(Block), strategy=strategy)
        for turn in range(2):
            for name in ("last", "blocks.1.up"):
                mine, copied = model.get_submodule(name), copies(model.get_submodule(name))
                for key, parameter in mine.named_parameters():
                    there: Any = copied.get_parameter(key)
                    assert isinstance(there, DTensor)
                    assert isinstance(there, nn.Parameter)
                    assert torch.equal(there.full_tensor(), parameter.full_tensor())
                    assert there.placements == parameter.placements
                    assert torch.equal(there.to_local(), parameter.to_local())
                    assert there.to_local().data_ptr() != parameter.to_local().data_ptr()
            with pytest.raises(StateError, match=rf"A sharded module cannot be .*rank {rank}"):
                copies(model.blocks)
            square_step(model, turn, rank)
            # Torch copies no DTensor with a gradient.
            model.zero_grad()

    on_ranks(2, on_rank)


def test_what_is_whole_is_copied_as_a_plain_module() -> None:
    x = draw(2, 3)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        with polyshard.unsharded(model):
            copies = [copy.deepcopy(model.first), pickled(model.first)]
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
    weight: Any = model[0].weight
    assert torch.equal(copy.deepcopy(weight).to_local(), weight.to_local())
