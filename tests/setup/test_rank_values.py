"""Ranks whose models have other values: refused by name, or given rank 0's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polyshard import ShardConfig
from polyshard.errors import ConfigError, RankMismatchError
from polyshard.planning.values import checksum
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

HYBRID = {"strategy": "hybrid_shard", "shard_size": 2}
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"strategy": "shard_grad_op"},
    "none": {"strategy": "no_shard"},
    "hybrid": HYBRID,
}


class Net(nn.Module):
    """Three units' worth of parameters, of two dtypes, and buffers of three."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.norm = nn.BatchNorm1d(5)
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.register_buffer("flags", torch.tensor([True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x)) @ self.wide.float().t()


def seeded(seed: int, device: str = "cpu", make: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return make()


def config(rank: int, world: ThreadedWorld, **others: Any) -> ShardConfig:
    policy = {"name": "module_class", "classes": [nn.Linear]}
    return ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, policy=policy, **others)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(model):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_were_seeded_differently_are_refused_by_name(strategy: str, world_size: int) -> None:
    def rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            model = seeded(rank)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        with pytest.raises(RankMismatchError) as caught:
            polyshard.shard(model, config(rank, world, **STRATEGIES[strategy]))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name])
        # The model is as it was: with other ranks' values it can be sharded.
        with world.lock:
            model.load_state_dict(seeded(0).state_dict())
        polyshard.shard(model, config(rank, world, **STRATEGIES[strategy]))
        return str(caught.value)

    texts = ThreadedWorld(world_size).run(rank)
    # Every rank raises the same words, so that any log will do.
    assert len(set(texts)) == 1
    for text in texts:
        assert all(f"Rank {other} holds other values than rank 0" in text for other in range(1, world_size))
        # The root's own come first.
        assert "'wide'" in text
        assert "sync_module_states=True" in text


@pytest.mark.parametrize("name", ["blocks.0.weight", "blocks.2.bias", "wide"])
def test_one_element_of_one_rank(name: str) -> None:
    def rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            model = seeded(0)
        if rank == 2:
            with torch.no_grad():
                model.get_parameter(name).view(-1)[-1].mul_(1 + 1e-6)
        with pytest.raises(RankMismatchError) as caught:
            polyshard.shard(model, config(rank, world))
        return str(caught.value)

    texts = ThreadedWorld(3).run(rank)
    # The one that most ranks are not like is named, on that rank too.
    assert all(f"Rank 2 holds other values than rank 0: '{name}' is the first" in text for text in texts)


def test_values_in_another_order_are_other_values() -> None:
    """What a plain sum would not see: rows in another order, a transposed matrix."""
    for change in (lambda w: w.flip(0), lambda w: w.t(), lambda w: w.t().contiguous().t()):

        def rank(rank: int, world: ThreadedWorld, change: Any = change) -> None:
            model = nn.Linear(4, 4, bias=False)
            weight = torch.arange(16.0).view(4, 4)
            model.weight = nn.Parameter(change(weight) if rank else weight)
            with pytest.raises(RankMismatchError, match="'weight'"):
                polyshard.shard(model, config(rank, world))

        ThreadedWorld(2).run(rank)


def test_a_rank_on_the_meta_device_beside_one_that_is_not() -> None:
    def rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(0, "meta" if rank else "cpu", lambda: nn.Linear(3, 3))
        with pytest.raises(RankMismatchError, match=r"(?s)'weight'.*meta"):
            polyshard.shard(model, config(rank, world))

    ThreadedWorld(2).run(rank)


def test_meta_parameters_are_not_compared() -> None:
    def rank(rank: int, world: ThreadedWorld) -> None:
        model = seeded(rank, "meta", lambda: nn.Linear(3, 3))
        polyshard.shard(model, config(rank, world), initializer=lambda module: nn.init.constant_(module.weight, rank))

    ThreadedWorld(2).run(rank)


def test_check_ranks_turns_it_off() -> None:
    def rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        with world.lock:
            model = seeded(rank, make=lambda: nn.Linear(4, 4, bias=False))
        polyshard.shard(model, config(rank, world, check_ranks=False))
        return whole(model)["weight"]

    first, second = ThreadedWorld(2).run(rank)
    assert torch.equal(first, second)
    mine = [seeded(seed, make=lambda: nn.Linear(4, 4, bias=False)).weight for seed in (0, 1)]
    assert torch.equal(first, torch.cat([mine[0][:2], mine[1][2:]]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_rank_0s_values_for_all(strategy: str, world_size: int) -> None:
    def rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            model = seeded(rank)
        model.norm.running_mean += rank
        model.flags[0] = not rank
        polyshard.shard(model, config(rank, world, sync_module_states=True, **STRATEGIES[strategy]))
        return whole(model)

    expected = seeded(0).state_dict()
    for state in ThreadedWorld(world_size).run(rank):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_rank_0_has_values(strategy: str) -> None:
    """The others are on the meta device, as where one rank alone reads a pretrained model."""

    def rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            model = seeded(0, "meta" if rank else "cpu")

        def fill(module: nn.Module) -> None:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    tensor.detach().fill_(rank)

        settings = config(rank, world, sync_module_states=True, device="cpu", **STRATEGIES[strategy])
        polyshard.shard(model, settings, initializer=fill)
        return whole(model)

    expected = seeded(0).state_dict()
    for state in ThreadedWorld(4).run(rank):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_meta_everywhere_gets_what_rank_0_initialised() -> None:
    def rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = seeded(0, "meta", lambda: nn.Linear(4, 4, bias=False))
        settings = config(rank, world, sync_module_states=True)
        polyshard.shard(model, settings, initializer=lambda module: nn.init.constant_(module.weight, rank + 1))
        return whole(model)["weight"]

    assert all(torch.equal(weight, torch.ones(4, 4)) for weight in ThreadedWorld(3).run(rank))


def test_composed_from_the_inside_out() -> None:
    def rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            model = seeded(rank)
        settings = ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, sync_module_states=True)
        polyshard.fully_shard(model.blocks, settings)
        polyshard.fully_shard(model, settings)
        return whole(model)

    expected = seeded(0).state_dict()
    for state in ThreadedWorld(2).run(rank):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_buffers_of_other_shapes_cannot_be_sent() -> None:
    def rank(rank: int, world: ThreadedWorld) -> None:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(1)
        model.register_buffer("seen", torch.zeros(1 + rank))
        with pytest.raises(RankMismatchError, match="'seen'"):
            polyshard.shard(model, config(rank, world, sync_module_states=True))

    ThreadedWorld(2).run(rank)


def test_the_setting_is_a_bool() -> None:
    with pytest.raises(ConfigError, match="sync_module_states must be True or False"):
        ShardConfig(sync_module_states="rank0")


# The checksum itself.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_one_changed_byte_changes_the_checksum(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    numel = data.draw(st.integers(1, 20_000))
    offset = data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    itemsize = dtype.itemsize
    memory = torch.randint(0, 256, ((numel + offset) * itemsize,), dtype=torch.uint8, generator=generator)
    # Views that begin anywhere, as parameters of a flat buffer do.
    values = memory.view(dtype)[offset:]
    before = checksum(values).item()
    assert checksum(values.clone()).item() == before
    memory[offset * itemsize + data.draw(st.integers(0, numel * itemsize - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(values).item() != before


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.integers(1, 60), st.data())
def test_two_rows_that_change_places_change_the_checksum(rows: int, width: int, data: st.DataObject) -> None:
    matrix = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    first = data.draw(st.integers(0, rows - 2))
    second = data.draw(st.integers(first + 1, rows - 1))
    other = matrix.clone()
    other[[first, second]] = matrix[[second, first]]
    assert checksum(matrix).item() != checksum(other).item()
