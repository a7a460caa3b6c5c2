"""Wrapping from the meta device: what it allocates, and what the parameters then hold."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, local, peak_of_live_bytes, units_of, whole_of
from polyshard import ShardConfig
from polyshard.errors import ParameterError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from torch import nn

CPU = torch.device("cpu")


def faked(model: nn.Module, rank: int = 0, world_size: int = 4, **arguments: Any) -> nn.Module:
    settings = {key: arguments.pop(key) for key in list(arguments) if key not in ("initializer", "ignored_modules")}
    collectives = FakeCollectives(PluginContext("fake", CPU), rank, world_size)
    return polyshard.shard(model, ShardConfig(collectives=collectives, device="cpu", **settings), **arguments)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


# What it allocates.


def tower(units: int = 12, width: int = 1024) -> nn.Module:
    """``units`` equal layers of two parameters in fp32, of ``UNIT`` bytes where ``width`` is 1024."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(units)))


UNIT = 4 * 1024 * (1024 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_never_more_than_the_shard_and_one_unit_is_alive(tmp_path: Path, precision: str, offload: str) -> None:
    model = on_meta(tower)
    faked(on_meta(lambda: tower(2, 16)), policy=units_of(nn.Linear))  # what the first call imports is not counted
    settings = {"policy": units_of(nn.Linear), "precision": precision, "offload": offload}
    peak = peak_of_live_bytes(lambda: faked(model, 1, 4, **settings), tmp_path)
    shard = 12 * UNIT // 4
    assert sum(local(p).nbytes for p in model.parameters()) == shard
    # At least the shards and the unit that is being cut are there; 64 KiB for what is not parameters.
    assert shard < peak <= shard + UNIT + 64 * 1024


@pytest.mark.slow
def test_cutting_a_whole_model_adds_no_more_than_the_shard_and_one_unit(tmp_path: Path) -> None:
    model = tower()
    faked(on_meta(lambda: tower(2, 16)), policy=units_of(nn.Linear))
    peak = peak_of_live_bytes(lambda: faked(model, 1, 4, policy=units_of(nn.Linear)), tmp_path)
    assert peak <= 12 * UNIT // 4 + UNIT + 64 * 1024


# What the parameters then hold.


#: The layers of ``Net`` with its blocks as units: the root's own, then each block's.
ORDER = ["first", "last", *(f"blocks.{index}.{layer}" for index in range(3) for layer in ("up", "down"))]


def initialised_in_order(model: nn.Module, order: list[str], seed: int) -> nn.Module:
    """``model``, a whole one, with ``reset_parameters`` called on the modules of ``order``."""
    torch.manual_seed(seed)
    for name in order:
        module: Any = model.get_submodule(name)
        module.reset_parameters()
    return model


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_holds_its_part_of_the_same_initialisation(world_size: int) -> None:
    expected = initialised_in_order(Net(), ORDER, seed=7)
    ranks = []
    for rank in range(world_size):
        model = on_meta(Net)
        torch.manual_seed(7)
        faked(model, rank, world_size, policy=units_of(Block))
        assert all(p.device == CPU for p in model.parameters())
        ranks.append({name: local(p.detach()) for name, p in model.named_parameters()})
    for name, parameter in expected.named_parameters():
        assert torch.equal(whole_of(parameter, [rank[name] for rank in ranks]), parameter), name


def test_only_parameters_from_meta_are_initialised() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta"))
    kept = model[0].weight.detach().clone()
    faked(model, 0, 2)
    assert torch.equal(local(model[0].weight), kept[:2])
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False, device="meta"))
    kept = model[0].weight.detach().clone()
    faked(model, 1, 2, policy=units_of(nn.Linear))
    assert torch.equal(local(model[0].weight), kept[2:])
    assert local(model[1].weight).shape == (2, 4)
    assert 0 < local(model[1].weight).abs().max() <= 0.5


class Bare(nn.Module):
    """Has no way to initialise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.inner = nn.Linear(2, 3, bias=False)


def test_an_initializer_is_called_once_for_each_module_that_holds_parameters() -> None:
    seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def fill(module: nn.Module) -> None:
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
        assert not any(p.is_meta for p in module.parameters(recurse=False))
        seen.append((type(module).__name__, shapes))
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 10 * len(seen))

    model = on_meta(Bare)
    faked(model, 1, 2, policy=units_of(nn.Linear), initializer=fill)
    assert seen == [("Bare", [(6,)]), ("Linear", [(3, 2)])]
    assert torch.equal(local(model.scale), torch.tensor([13.0, 14.0, 15.0]))
    # Of three rows over two ranks the second has the last.
    assert torch.equal(local(model.inner.weight), torch.tensor([[24.0, 25.0]]))


class Replacing(nn.Linear):
    """Assigns new parameters instead of filling the ones that are there."""

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.full((4, 4), 3.0))
        self.bias = nn.Parameter(torch.full((4,), 5.0))


def test_an_initialiser_may_assign_new_parameters() -> None:
    model = on_meta(lambda: Replacing(4, 4))
    faked(model, 1, 2)
    assert torch.equal(local(model.weight), torch.full((2, 4), 3.0))
    assert torch.equal(local(model.bias), torch.full((2,), 5.0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_parameters_from_meta_that_others_refer_to_weakly_are_initialised() -> None:
    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 2))

    model = on_meta(made)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    torch.manual_seed(3)
    faked(model, world_size=1, strategy="no_shard")
    gc.collect()
    assert [reference() for reference in references] == [None] * 6
    assert all(map(torch.equal, map(local, model.parameters()), made().parameters()))


def test_tied_parameters_from_meta_stay_tied() -> None:
    model = on_meta(Tied)
    faked(model, 1, 2, policy=units_of(nn.Linear, nn.Embedding))
    assert model.head.weight is model.embed.weight
    assert local(model.embed.weight).shape == (3, 4)
    model(torch.tensor([1, 2])).sum().backward()
    assert model.embed.weight.grad is not None


# Buffers.


def test_buffers_are_materialised_and_initialised() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    faked(model, 0, 2, policy=units_of(nn.BatchNorm1d))
    norm: Any = model[1]
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(norm.running_var, torch.ones(3))
    assert norm.num_batches_tracked.item() == 0
    assert all(buffer.device == CPU for buffer in model.buffers())


class Rotary(nn.Module):
    """Buffers, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.frequencies.copy_(10000.0 ** (-torch.arange(4) / 4))


class Plain(nn.Module):
    """A buffer from meta that nobody can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))


def test_buffers_of_modules_without_parameters_are_initialised_too() -> None:
    expected = Rotary().frequencies
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Rotary()))
    faked(model, 0, 2)
    assert torch.equal(model[1].frequencies, expected)

    def fill(module: nn.Module) -> None:
        if isinstance(module, Plain):
            module.table.copy_(torch.arange(4.0))
        else:
            module.reset_parameters()  # type: ignore[operator]

    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Plain()))
    faked(model, 0, 2, initializer=fill)
    assert torch.equal(model[1].table, torch.arange(4.0))


def test_buffers_that_nobody_can_fill_are_refused() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Plain()))
    with pytest.raises(ParameterError, match=r"1\.table.*Plain.*reset_parameters.*initializer="):
        faked(model, 0, 2)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
