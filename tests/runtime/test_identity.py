"""Parameters keep their names, and what the user does to them between steps is honoured."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_all_close,
    assert_observed,
    assert_parity,
    draw,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sgd,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    train_sharded,
    units_of,
    warns_for,
    whole,
)
from polyshard.errors import ParameterChangedError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

BLOCKS = {"policy": units_of(Block)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_parameters_have_the_same_names_and_attributes_and_stay_the_same_objects(world_size: int, device: str) -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            mine = copy.deepcopy(model).to(device)
        mine.last.weight.learning_rate_scale = 0.5
        mine.blocks[1].up.bias.requires_grad_(False)
        before = dict(mine.named_parameters())
        modules = dict(mine.named_modules())
        polyshard.shard(mine, threaded(world, rank, **BLOCKS, device="cpu"))
        after = dict(mine.named_parameters())
        assert list(after) == list(before)
        assert all(isinstance(each, nn.Parameter) and isinstance(each, DTensor) for each in after.values())
        assert all(each.is_leaf and each.shape == before[name].shape for name, each in after.items())
        assert all(parameter.device.type == "cpu" for parameter in after.values())
        assert dict(mine.named_modules()) == modules
        assert mine.last.weight.learning_rate_scale == 0.5
        assert {name for name, each in after.items() if not each.requires_grad} == {"blocks.1.up.bias"}
        square_step(mine, 0, rank)
        assert all(dict(mine.named_parameters())[name] is after[name] for name in before)

    with warns_for(world_size):
        on_ranks(world_size, on_rank)


def change_object(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def change_object_in_place(model: nn.Module) -> None:
    # The new object must not be mistaken for the old one on later steps.
    change_object(model)
    change_object(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)


def change_behind_a_forward(model: nn.Module) -> None:
    # Without a backward, which would release what it leaves whole.
    model(draw(4, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@one_by_one("world_size", [3, 1], "change", [change_object, change_object_in_place, change_behind_a_forward])
def test_values_changed_between_steps_are_honoured(world_size: int, change: Callable[[nn.Module], None]) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if turn == 1:
            change(model)
        return square_step(model, turn, rank)

    model = seeded(Net)
    # The optimizer of a model with replaced objects holds the old ones: parity of the step's numbers is what counts.
    reference = train_reference(model, step, world_size, turns=2)
    sharded = train_sharded(model, step, world_size, turns=2, settings=BLOCKS)
    for turn in range(2):
        torch.testing.assert_close(sharded.observed[turn], reference.observed[turn], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sharded.gradients[turn], reference.gradients[turn], rtol=1e-12, atol=1e-12)


def test_a_new_parameter_that_lies_as_the_old_one_is_taken_over() -> None:
    model = seeded(Net)
    new = draw(2, 5, turn=7)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        old: Any = mine.last.weight
        square_step(mine, 0, rank)
        mine.zero_grad()
        value = distribute_tensor(new.clone(), old.device_mesh, old.placements, src_data_rank=None)
        taken = mine.last.weight = nn.Parameter(value)
        square_step(mine, 1, rank)
        assert mine.last.weight is taken
        assert old.grad is None
        sgd(mine).step()
        return whole(mine)

    replica = copy.deepcopy(model)
    with torch.no_grad():
        replica.last.weight.copy_(new)
    reference = train_reference(replica, lambda m, turn, rank: square_step(m, 1, rank), 3, turns=1)
    assert_all_close(on_ranks(3, on_rank), reference.parameters)


@pytest.mark.parametrize("replaces", ["all", "one"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_replaced_gradients_reach_the_optimizer_and_are_accumulated_to(world_size: int, replaces: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        seen = square_step(model, turn, rank)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and (replaces == "all" or name == "blocks.1.up.weight"):
                    parameter.grad = torch.full_like(parameter, 0.25)
        return seen

    model = seeded(Net)
    chosen = {name for name, _ in model.named_parameters() if replaces == "all" or name == "blocks.1.up.weight"}
    result = train_sharded(model, step, world_size, turns=1, settings=BLOCKS)
    reference = train_reference(model, square_step, world_size, turns=2)
    for name, before in model.named_parameters():
        gradient = torch.full_like(before, 0.25) if name in chosen else reference.gradients[0][name]
        torch.testing.assert_close(
            result.parameters[name], before.detach() - 0.1 * gradient.detach(), rtol=1e-12, atol=1e-12
        )

    def accumulates(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        step(model, turn, rank)
        return square_step(model, turn, rank)

    twice = train_sharded(model, accumulates, world_size, turns=1, settings=BLOCKS)
    for name, before in model.named_parameters():
        once = reference.gradients[0][name]
        kept = torch.full_like(before, 0.25).detach() if name in chosen else once
        torch.testing.assert_close(twice.gradients[0][name], kept + once, rtol=1e-12, atol=1e-12)


def wrong_shape(weight: Any) -> torch.Tensor:
    return DTensor.from_local(weight.to_local().repeat(2), weight.device_mesh, weight.placements)


def wrong_dtype(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float()


def plain(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(weight.shape, dtype=weight.dtype)


def lies_otherwise(weight: Any) -> torch.Tensor:
    return weight.detach().redistribute(placements=[Replicate()])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (wrong_shape, "Cannot writeback when the parameter shape changes"),
        (wrong_dtype, "float32"),
        (plain, "was replaced by a plain tensor"),
        (lies_otherwise, r"was replaced by a DTensor with \(Replicate\(\),\).*Redistribute it"),
    ],
)
def test_a_replacement_that_cannot_be_taken_over_is_refused_and_the_model_goes_on(
    wrong: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        block = mine.blocks[1]
        weight = block.up.bias
        block.up.bias = nn.Parameter(wrong(weight))
        with pytest.raises(ParameterChangedError, match=words) as caught:
            mine(draw(4, 3))
        assert "'blocks.1.up.bias'" in str(caught.value)
        assert f"rank {rank}" in str(caught.value)
        assert root_of(mine).gathered == ()
        block.up.bias = weight
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


def test_a_deleted_parameter_is_refused_by_name() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        mine.blocks[0].up.bias = None
        with pytest.raises(ParameterChangedError, match=r"'blocks\.0\.up\.bias'"):
            mine(draw(4, 3))

    on_ranks(2, on_rank)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_parameter_replaced_between_forward_and_backward_is_refused(strategy: str) -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS, strategy=strategy)
        loss = mine(draw(4, 3)).square().mean()
        mine.blocks[1].up.bias = nn.Parameter(mine.blocks[1].up.bias.detach().clone())
        with pytest.raises(
            ParameterChangedError, match=r"cannot be changed between forward and backward: .*replaced on rank"
        ) as caught:
            loss.backward()
        assert "'blocks.1.up.bias'" in str(caught.value)
        mine.zero_grad()
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


def test_requires_grad_as_it_is_at_the_backward_counts() -> None:
    """Frozen for a forward in between, or frozen after the forward: as in plain torch."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank)).square().mean()
        if turn < 2:
            model.requires_grad_(False)
            model(draw(4, 3, turn=turn + 5, rank=rank))
            model.requires_grad_(True)
        else:
            model.blocks[1].up.weight.requires_grad_(False)
        loss.backward()
        return [loss.detach()]

    assert_parity(seeded(Net), step, settings=BLOCKS)


def test_a_sharded_model_is_cast_as_a_plain_one() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        mine = sharded_copy(model, rank, world, **BLOCKS).to("cpu")
        square_step(mine, 0, rank)
        mine.zero_grad()
        mine.float()
        loss: torch.Tensor = mine(draw(4, 3).float()).square().mean()
        loss.backward()
        assert {(each.dtype, each.grad.dtype) for each in mine.parameters()} == {(torch.float32, torch.float32)}
        return loss.detach()

    expected = copy.deepcopy(model).float()(draw(4, 3).float()).square().mean().detach()
    assert_all_close(on_ranks(2, on_rank), expected)


def test_channels_last_parameters_keep_their_strides_in_compute() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stride = self.convolution.weight.stride()
            return self.head(self.convolution(x).mean((2, 3)))

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(2, 2, 4, 4, turn=turn, rank=rank)).square().mean()
        loss.backward()
        assert model.stride == (8, 1, 4, 2)
        return [loss.detach()]

    assert_parity(seeded(Convolution), step, world_size=3)
