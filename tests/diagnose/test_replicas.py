"""``polyshard.check_replicas``: one bit that differs between replicas is an error on all ranks, with its place."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, adam, draw, local, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import ConfigError, RankMismatchError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
HYBRID = {"strategy": "hybrid_shard", "shard_size": 2}
COPIES = [(3, {"strategy": "no_shard"}), (4, HYBRID)]


def train(model: nn.Module, rank: int, steps: int = 2) -> None:
    optimizer = adam(model)
    for step in range(steps):
        model(draw(4, 3, rank=rank + 10 * step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Change one bit of one element."""
    width = {4: torch.int32, 8: torch.int64}[tensor.element_size()]
    with torch.no_grad():
        local(tensor).view(-1).view(width)[element] ^= 1 << bit


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "settings"), COPIES)
def test_replicas_agree_after_training(world_size: int, settings: dict[str, Any]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        polyshard.check_replicas(model)
        train(model, rank)
        polyshard.check_replicas(model)

    on_ranks(world_size, on_rank)


@pytest.mark.parametrize("bit", [0, 17, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bit_is_found_and_named_on_all_ranks(bit: int, dtype: torch.dtype) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net).to(dtype), rank, world, **BLOCKS, strategy="no_shard")
        name, parameter = list(model.named_parameters())[-3]
        if rank == 1:
            flip(parameter, 2, bit)
        with pytest.raises(RankMismatchError) as caught:
            polyshard.check_replicas(model)
        assert f"Parameter '{name}'" in str(caught.value)
        if rank == 1:
            flip(parameter, 2, bit)
        polyshard.check_replicas(model)
        return str(caught.value)

    for rank, message in enumerate(on_ranks(3, on_rank)):
        assert "on ranks [1] it is not what it is on ranks [0, 2]" in message
        assert f"(rank {rank})" in message


def test_ranks_whose_own_replicas_agree_raise_too_and_the_first_of_several_is_named() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **HYBRID)
        if rank == 2:
            for name in ("blocks.2.", "blocks.1."):
                held = [p for key, p in model.named_parameters() if key.startswith(name) and local(p).numel()]
                flip(held[0], 0, 3)
        with pytest.raises(RankMismatchError) as caught:
            polyshard.check_replicas(model)
        return str(caught.value)

    for message in on_ranks(4, on_rank):
        assert "of unit 'blocks.1'" in message
        assert "no value of it is on most: [0], [2]" in message
        assert "1 more differ" in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_two_elements_that_change_signs_or_places_are_found(dtype: torch.dtype) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(lambda: nn.Linear(4, 4)).to(dtype), rank, world, strategy="no_shard")
        both = local(next(model.parameters())).detach().view(-1)[:2]
        for values, others in (([1.0, 1.0], [-1.0, -1.0]), ([1.0, 2.0], [2.0, 1.0])):
            both.copy_(torch.tensor(values))
            polyshard.check_replicas(model)
            if rank == 1:
                both.copy_(torch.tensor(others))
            with pytest.raises(RankMismatchError, match=r"Parameter 'weight'"):
                polyshard.check_replicas(model)

    on_ranks(2, on_rank)


def test_parameters_of_bf16_and_flat_ones_are_compared() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net).bfloat16(), rank, world, **BLOCKS, **HYBRID)
        flat = polyshard.flat_parameters(model)
        polyshard.check_replicas(model)
        if rank == 2:
            with torch.no_grad():
                local(flat[0]).view(torch.int16)[0] ^= 1
        with pytest.raises(RankMismatchError, match="differs between ranks"):
            polyshard.check_replicas(model)

    on_ranks(4, on_rank)


def test_without_replicas_it_is_refused_and_training_goes_on() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with pytest.raises(ConfigError, match="'no_shard' or 'hybrid_shard'"):
            polyshard.check_replicas(model)
        train(model, rank)

    on_ranks(2, on_rank)


def test_inside_a_step_and_unsharded_it_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, strategy="no_shard")
        with polyshard.unsharded(model), pytest.raises(StateError, match="unsharded"):
            polyshard.check_replicas(model)
        polyshard.check_replicas(model)

    on_ranks(2, on_rank)
    with pytest.raises(StateError, match="not sharded"):
        polyshard.check_replicas(Net())


def test_a_single_rank_has_nothing_to_compare() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        polyshard.check_replicas(sharded_copy(seeded(Net), rank, world, **BLOCKS, strategy="no_shard"))

    on_ranks(1, on_rank)
