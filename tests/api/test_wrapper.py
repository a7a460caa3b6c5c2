"""``FullyShardedDataParallel``: the engine as a module around the model."""

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
    draw,
    local,
    on_ranks,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    units_of,
)
from polyshard import FullyShardedDataParallel, ShardConfig
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}


def fake(rank: int = 0, world_size: int = 4) -> FakeCollectives:
    return FakeCollectives(PluginContext("fake", torch.device("cpu")), rank, world_size)


def wrapped(model: nn.Module, **settings: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, ShardConfig(collectives=fake(), **BLOCKS, **settings))


class Chatty(Net):
    """Has more than a forward."""

    scale = 3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def describe(self) -> str:
        return f"{len(self.blocks)} blocks"

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        x = super().forward(x - self.mean)
        return 2 * x if twice else x


def test_training_through_the_wrapper_equals_that_of_the_unsharded_model() -> None:
    model = seeded(Net)
    expected = train_reference(model, square_step, 2, 5, adam)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        sharded = FullyShardedDataParallel(mine, threaded(world, rank, **BLOCKS))
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        for turn in range(5):
            loss, x_gradient = square_step(sharded, turn, rank)
            torch.testing.assert_close(loss, expected.observed[turn][rank][0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x_gradient, expected.observed[turn][rank][1], rtol=1e-12, atol=1e-12)
            optimizer.step()
            optimizer.zero_grad()
        with sharded.unsharded():
            return {name: p.detach().clone() for name, p in sharded.named_parameters()}

    assert_all_close(on_ranks(2, on_rank), expected.parameters)


def test_arguments_and_output_of_forward_pass_through() -> None:
    model = seeded(Chatty)
    x = draw(4, 3)
    expected = model(x, twice=True).detach()
    with pytest.warns(UserWarning, match="NO_SHARD"):
        sharded = FullyShardedDataParallel(model, ShardConfig(collectives=fake(0, 1), **BLOCKS))
    torch.testing.assert_close(sharded(x, twice=True).detach(), expected, rtol=0, atol=1e-15)
    assert sharded.module is model


def test_names_are_the_modules_own() -> None:
    model = seeded(Chatty)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = list(model.state_dict())
    sharded = wrapped(model)
    inside = dict(model.named_parameters())
    assert [name for name, _ in sharded.named_parameters()] == list(parameters)
    assert all(p is inside[name] for name, p in sharded.named_parameters())
    assert {id(p) for p in sharded.parameters()} == {id(p) for p in inside.values()}
    assert [name for name, _ in sharded.named_buffers()] == list(buffers)
    rows = sharded.state_dict()
    assert list(rows) == state
    answer = sharded.load_state_dict({name: torch.ones_like(value) for name, value in rows.items()})
    assert not answer.missing_keys
    assert all((local(parameter) == 1).all() for parameter in sharded.parameters())
    with polyshard.unsharded(sharded):
        assert list(sharded.state_dict()) == state
    assert [name for name, _ in sharded.named_parameters(prefix="outer")] == [f"outer.{name}" for name in parameters]
    assert [name for name, _ in sharded.named_parameters(recurse=False)] == []


def test_attributes_and_items_are_the_modules() -> None:
    model = seeded(Chatty)
    sharded = wrapped(model)
    assert sharded.scale == 3
    assert sharded.describe() == "3 blocks"
    assert sharded.blocks is model.blocks
    assert sharded.first.weight is model.first.weight
    assert sharded.mean is model.mean
    assert not hasattr(sharded, "nothing_of_this_name")
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = sharded.nothing_of_this_name
    layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    indexed = FullyShardedDataParallel(layers, ShardConfig(collectives=fake()))
    assert indexed[0] is layers[0]
    assert indexed[-1].__class__ is nn.ReLU


def test_train_and_eval_reach_the_module() -> None:
    sharded = wrapped(seeded(Chatty))
    sharded.eval()
    assert not any(module.training for module in sharded.module.modules())
    sharded.train()
    assert all(module.training for module in sharded.module.modules())


@pytest.mark.parametrize("writeback", [True, False])
def test_methods_do_what_the_functions_do(writeback: bool) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        wrapper = FullyShardedDataParallel(seeded(Net), threaded(world, rank, **BLOCKS))
        other = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with wrapper.no_sync(), polyshard.no_sync(other):
            square_step(wrapper, 0, rank)
            square_step(other, 0, rank)
        assert all(p.grad is None for p in wrapper.parameters())
        square_step(wrapper, 1, rank)
        square_step(other, 1, rank)
        norm = wrapper.clip_grad_norm_(0.05)
        assert torch.equal(norm, polyshard.clip_grad_norm_(other, 0.05))
        assert norm > 0.05
        for mine, theirs in zip(wrapper.parameters(), other.parameters(), strict=True):
            assert torch.equal(local(mine.grad), local(theirs.grad))
        assert polyshard.clip_grad_norm_(wrapper, 1.0) == pytest.approx(0.05, rel=1e-3)
        shards = [local(p.detach()).clone() for p in wrapper.parameters()]
        with wrapper.unsharded(writeback=writeback), torch.no_grad():
            assert wrapper.first.weight.shape == (5, 3)
            for parameter in wrapper.parameters():
                parameter.add_(1.0)
        for parameter, shard in zip(wrapper.parameters(), shards, strict=True):
            assert torch.equal(local(parameter), shard + (1.0 if writeback else 0.0))
        assert polyshard.report(wrapper).world_size == 2

    on_ranks(2, on_rank)


def test_arguments_of_shard_are_taken() -> None:
    model = seeded(Net)
    ignored = model.blocks[0]
    sharded = FullyShardedDataParallel(
        model, ShardConfig(collectives=fake()), ignored_modules=[ignored], ignored_parameters=[model.first.bias]
    )
    assert type(sharded.blocks[0].up.weight) is type(sharded.first.bias) is nn.Parameter
    assert local(sharded.last.weight).shape == (1, 5)
    with torch.device("meta"):
        meta = nn.Linear(4, 4)
    made = FullyShardedDataParallel(
        meta,
        ShardConfig(collectives=fake(0, 2), device="cpu"),
        initializer=lambda module: nn.init.constant_(module.weight, 7.0),
    )
    assert torch.equal(local(made.weight), torch.full((2, 4), 7.0))


def test_a_wrapper_may_stand_inside_a_larger_model() -> None:
    inside = wrapped(seeded(Net))
    model = nn.Sequential(nn.Linear(3, 3).double(), inside)
    model(draw(4, 3)).sum().backward()
    assert root_of(inside.module).gathered == ()
    assert model[0].weight.grad is not None
    assert inside.first.weight.grad is not None
