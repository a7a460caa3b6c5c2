"""``state_dict`` and ``load_state_dict`` of sharded models, and torch's functions around them."""

from __future__ import annotations

import copy
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    draw,
    on_ranks,
    one_by_one,
    seeded,
    sgd,
    sharded_copy,
    square_step,
    train,
    train_reference,
    units_of,
    whole,
)
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

BLOCKS = {"policy": units_of(Block)}
STRATEGIES = [
    (3, {"strategy": "full_shard"}),
    (2, {"strategy": "shard_grad_op"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]


@pytest.mark.parametrize(("world_size", "settings"), [*STRATEGIES, (2, {"strategy": "no_shard"})])
def test_a_model_and_its_modules_have_dtensors(world_size: int, settings: dict[str, Any]) -> None:
    plain = seeded(Net).state_dict()

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        for turn in range(2):
            for where in ("", "blocks", "blocks.1.down"):
                wanted = {name: each for name, each in plain.items() if name.startswith(where)}
                state = model.get_submodule(where).state_dict()
                assert [f"{where}.{name}" if where else name for name in state] == list(wanted)
                for found, value in zip(state.values(), wanted.values(), strict=True):
                    assert torch.equal(found.full_tensor(), value)
            if turn == 0:
                square_step(model, 0, rank)

    on_ranks(world_size, on_rank)


@one_by_one("assign", [False, True], "world_size, settings", STRATEGIES)
def test_whole_parameters_are_loaded(world_size: int, settings: dict[str, Any], assign: bool) -> None:
    given = seeded(Net, seed=7)
    wanted = train_reference(copy.deepcopy(given), square_step, world_size, turns=2)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        square_step(model, 5, rank)
        model.zero_grad()
        state = copy.deepcopy(given.state_dict())
        before = {name: tuple(value.shape) for name, value in state.items()}
        answer = model.load_state_dict(state, assign=assign)
        assert not answer.missing_keys
        assert not answer.unexpected_keys
        assert {name: tuple(value.shape) for name, value in state.items()} == before
        # As of an unsharded model: what is assigned are other parameters.
        train(model, sgd(model), square_step, rank, 2)
        return whole(model)

    for got in on_ranks(world_size, on_rank):
        torch.testing.assert_close(got, wanted.parameters, rtol=1e-12, atol=1e-12)


def _loads_dtensors(rank: int, settings: dict[str, Any], assign: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    placed = {1: [Shard(0)], 2: [Shard(1)]}
    state: dict[str, Any] = {
        name: nn.Parameter(distribute_tensor(value, mesh, placed[value.ndim]))
        for name, value in seeded(Net, seed=7).state_dict().items()
    }
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(**BLOCKS, **settings))
    wrong = {**state, "last.bias": distribute_tensor(torch.zeros(9).double(), mesh, placed[1])}
    with pytest.raises((StateError, RuntimeError), match=r"last\.bias"):
        model.load_state_dict(wrong)
    answer = model.load_state_dict(state, assign=assign)
    assert not answer.missing_keys
    model(draw(4, 3)).sum().backward()
    return whole(model)


@pytest.mark.slow
def test_dtensors_of_other_placements_are_loaded() -> None:
    wanted = {name: p.detach() for name, p in seeded(Net, seed=7).named_parameters()}
    with RankPool(2) as ranks:
        for settings in ({}, {"strategy": "no_shard"}):
            for assign in (False, True):
                for got in ranks.run(_loads_dtensors, settings, assign):
                    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
