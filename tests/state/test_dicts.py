"""State dicts of sharded models: whole, or refused by name; pieces for those who ask for pieces."""

from __future__ import annotations

import copy
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, square_step, train_reference, units_of
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

BLOCKS = {"policy": units_of(Block)}
STRATEGIES = [
    (3, {"strategy": "full_shard"}),
    (2, {"strategy": "shard_grad_op"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(("world_size", "settings"), STRATEGIES)
@pytest.mark.parametrize(
    ("where", "name"),
    [("", "first.weight"), ("blocks", "blocks.0.up.weight"), ("blocks.1.down", "blocks.1.down.weight")],
)
def test_pieces_are_not_given_out_as_a_model(world_size: int, settings: dict[str, Any], where: str, name: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        with pytest.raises(StateError) as caught:
            model.get_submodule(where).state_dict()
        with pytest.raises(StateError):
            nn.Sequential(model).state_dict()
        square_step(model, 0, rank)
        with pytest.raises(StateError):
            model.get_submodule(where).state_dict()
        return str(caught.value)

    for rank, message in enumerate(on_ranks(world_size, on_rank)):
        assert f"'{name}' sharded (rank {rank})" in message
        for instead in ("polyshard.checkpoint.save", "polyshard.unsharded(model)", "polyshard.local_state_dict(model)"):
            assert instead in message


@pytest.mark.slow
def test_whole_parameters_are_given_out_inside_unsharded() -> None:
    plain = seeded(Net).state_dict()

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, Any]]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with polyshard.unsharded(model):
            states = [model.state_dict(), get_model_state_dict(model)]
            states.append(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
            return copy.deepcopy(states)

    for states in on_ranks(3, on_rank):
        for state in states:
            assert list(state) == list(plain)
            torch.testing.assert_close(dict(state), dict(plain), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_whole_on_every_rank_needs_no_more(world_size: int) -> None:
    plain = seeded(Net, seed=1).state_dict()

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, Any]]:
        model = sharded_copy(seeded(Net), rank, world, strategy="no_shard", **BLOCKS)
        optimizer = adam(model)
        model.load_state_dict(plain)
        states = [copy.deepcopy(model.state_dict()), get_model_state_dict(model)]
        square_step(model, 0, rank)
        optimizer.step()
        assert get_optimizer_state_dict(model, optimizer)["state"].keys() == plain.keys()
        return states[:1]

    for (state,) in on_ranks(world_size, on_rank):
        torch.testing.assert_close(dict(state), dict(plain), rtol=0, atol=0)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("world_size", "settings"), STRATEGIES)
def test_whole_parameters_are_loaded(world_size: int, settings: dict[str, Any], assign: bool) -> None:
    given = seeded(Net, seed=7)
    wanted = train_reference(copy.deepcopy(given), square_step, world_size, turns=2)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        square_step(model, 5, rank)
        optimizer.zero_grad()
        state = copy.deepcopy(given.state_dict())
        before = {name: tuple(value.shape) for name, value in state.items()}
        answer = model.load_state_dict(state, assign=assign)
        assert not answer.missing_keys
        assert not answer.unexpected_keys
        assert {name: tuple(value.shape) for name, value in state.items()} == before
        for turn in range(2):
            square_step(model, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        with polyshard.unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    for got in on_ranks(world_size, on_rank):
        torch.testing.assert_close(got, wanted.parameters, rtol=1e-12, atol=1e-12)


def test_pieces_are_loaded_as_pieces_alone() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        state = {name: value + 1 for name, value in polyshard.local_state_dict(model).items()}
        before = {name: value.clone() for name, value in polyshard.local_state_dict(model).items()}
        with pytest.raises(StateError) as caught:
            model.load_state_dict(state)
        torch.testing.assert_close(dict(polyshard.local_state_dict(model)), before, rtol=0, atol=0)
        polyshard.load_local_state_dict(model, state)
        torch.testing.assert_close(dict(polyshard.local_state_dict(model)), state, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="size mismatch"):
            polyshard.load_local_state_dict(model, seeded(Net).state_dict())
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        assert f"the whole parameter has (5, 3) (rank {rank})" in message
        assert "'first.weight'" in message
        assert "polyshard.load_local_state_dict" in message


def test_a_model_that_is_not_sharded_has_no_pieces() -> None:
    for call in (polyshard.local_state_dict, lambda model: polyshard.load_local_state_dict(model, {})):
        with pytest.raises(StateError, match="nothing in this Net is sharded"):
            call(Net())


@pytest.mark.parametrize("stepped", [False, True])
def test_states_of_optimizers_over_pieces_are_not_taken_for_whole(stepped: bool) -> None:
    plain = seeded(Net)
    whole_optimizer = adam(plain)
    square_step(plain, 0, 0)
    whole_optimizer.step()
    whole = get_optimizer_state_dict(plain, whole_optimizer)
    wanted = train_reference(seeded(Net), square_step, 2, 1 + stepped, adam).parameters

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = adam(model)
        for turn in range(1 + stepped):
            if turn == stepped:
                for call in (
                    lambda: get_optimizer_state_dict(model, optimizer),
                    lambda: set_optimizer_state_dict(model, optimizer, copy.deepcopy(whole)),
                ):
                    with pytest.raises(StateError, match=r"AdamW.*polyshard\.checkpoint"):
                        call()
                with pytest.raises(StateError, match=r"'first\.weight' sharded"):
                    get_state_dict(model, optimizer)
                with polyshard.unsharded(model), pytest.raises(StateError, match="AdamW"):
                    get_state_dict(model, optimizer)
            square_step(model, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        # This rank's own, for whoever asks the optimizer itself.
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with polyshard.unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    for got in on_ranks(2, on_rank):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def _loads(rank: int, broadcasts: bool) -> dict[str, torch.Tensor]:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(**BLOCKS))
    with pytest.raises(StateError, match="sharded"):
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state = seeded(Net, seed=7).state_dict() if rank == 0 or not broadcasts else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcasts)
    set_model_state_dict(model, state, options=options)
    with polyshard.unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


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
    with polyshard.unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_on_processes() -> None:
    wanted = {name: p.detach() for name, p in seeded(Net, seed=7).named_parameters()}
    with RankPool(2) as ranks:
        for broadcasts in (False, True):
            for got in ranks.run(_loads, broadcasts):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for settings in ({}, {"strategy": "no_shard"}):
            for assign in (False, True):
                for got in ranks.run(_loads_dtensors, settings, assign):
                    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
