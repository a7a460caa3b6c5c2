"""One parameter a unit for the optimizer, beside the parameters of the model."""

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
    adam,
    draw,
    is_sharded,
    local,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    units_of,
    warns_for,
    whole,
)
from polyshard.errors import StateError, UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.tensor import DTensor

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")


def flat_adam(model: nn.Module) -> torch.optim.Optimizer:
    if not is_sharded(model):
        return adam(model)
    return torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-2)


def trained(
    world_size: int, turns: int, make: Callable[[], nn.Module] = Net, **settings: Any
) -> list[dict[str, torch.Tensor]]:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(make), rank, world, **settings)
        optimizer = flat_adam(model)
        for turn in range(turns):
            square_step(model, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    with warns_for(world_size, settings):
        return on_ranks(world_size, on_rank)


def test_gradients_of_parameters_are_views_that_cannot_be_exchanged() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        flat = polyshard.flat_parameters(model)
        square_step(model, 0, rank)
        weight = model.blocks[0].up.weight
        local(weight.grad).zero_()
        assert (local(flat[1].grad) == 0).sum() >= local(weight).numel()
        with pytest.raises(StateError, match=rf"\.grad of 'blocks\.0\.up\.weight' on rank {rank} was set"):
            weight.grad = torch.zeros_like(weight)
        model.zero_grad()
        assert all(parameter.grad is None for parameter in flat)
        copied = copy.deepcopy(weight)
        assert type(copied) is DTensor
        assert torch.equal(local(copied), local(weight))

    on_ranks(2, on_rank)


def test_parameters_outside_of_units_come_last() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = seeded(Net)
        aside = model.last.bias
        polyshard.shard(model, threaded(world, rank, policy=units_of(Block)), ignored_parameters=[aside])
        flat = polyshard.flat_parameters(model)
        assert flat[-1] is aside
        assert len(flat) == 5

    on_ranks(2, on_rank)


def test_a_gradient_from_before_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        square_step(model, 0, rank)
        with pytest.raises(StateError, match=rf"on rank {rank} has a gradient already.*after zero_grad"):
            polyshard.flat_parameters(model)
        model.zero_grad()
        assert len(polyshard.flat_parameters(model)) == 4

    on_ranks(2, on_rank)


def test_freezing_a_part_of_a_unit_is_refused_until_it_is_undone() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        flat = polyshard.flat_parameters(model)
        square_step(model, 0, rank)
        model.blocks[1].up.weight.requires_grad_(False)
        for _ in range(2):
            with pytest.raises(StateError, match=r"Only some parameters of unit 'blocks.1'.*Freeze all of them"):
                model(draw(4, 3))
        for parameter in model.blocks[1].parameters():
            parameter.requires_grad_(False)
        for parameter in flat:
            parameter.grad = None
        square_step(model, 1, rank)
        assert [parameter.grad is not None for parameter in flat] == [True, True, False, True]

    on_ranks(2, on_rank)


def test_inner_modules_have_no_flat_parameters() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        with pytest.raises(StateError, match="flat_parameters"):
            polyshard.flat_parameters(model.blocks[0])

    on_ranks(2, on_rank)


def test_hooks_after_accumulation_run_on_flat_parameters() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> int:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        seen: list[torch.Tensor] = []
        for parameter in polyshard.flat_parameters(model):
            parameter.register_post_accumulate_grad_hook(seen.append)
        square_step(model, 0, rank)
        return sum(parameter.grad is not None for parameter in seen)

    assert on_ranks(2, on_rank) == [4, 4]


class ScaledBlock(Block):
    """A parameter that is used where ``scaled`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.scaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * self.scale if self.scaled else x


def partly_used() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), ScaledBlock(), nn.Linear(5, 2))


#: Steps, and of each the backwards, and of each the ranks that use the parameter.
Uses = list[list[set[int]]]


def train_partly(model: Any, optimizer: torch.optim.Optimizer, uses: Uses, ranks: list[int], share: int) -> None:
    for turn, backwards in enumerate(uses):
        for part, using in enumerate(backwards):
            for rank in ranks:
                model[1].scaled = rank in using
                x = draw(4, 3, turn=10 * turn + part, rank=rank)
                (model(x).square().mean() / share).backward()
        optimizer.step()
        optimizer.zero_grad()


def partly_trained(make: Callable[[Any], torch.optim.Optimizer], uses: Uses) -> list[torch.Tensor]:
    plain = seeded(partly_used)
    train_partly(plain, make(plain.parameters()), uses, [0, 1], 2)
    return [parameter.detach() for parameter in plain.parameters()]


def flat_trained(make: Callable[[Any], torch.optim.Optimizer], uses: Uses) -> list[list[torch.Tensor]]:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = sharded_copy(seeded(partly_used), rank, world, policy=units_of(Block))
        train_partly(model, make(polyshard.flat_parameters(model)), uses, [rank], 1)
        with polyshard.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    return on_ranks(2, on_rank)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


MOVES_WITHOUT_GRADIENTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "decay": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", MOVES_WITHOUT_GRADIENTS)
def test_a_parameter_without_gradients_in_a_unit_that_has_some_is_refused_by_name(name: str) -> None:
    make = MOVES_WITHOUT_GRADIENTS[name]

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model: Any = sharded_copy(seeded(partly_used), rank, world, policy=units_of(Block))
        optimizer = make(polyshard.flat_parameters(model))
        model[1].scaled = True
        model(draw(4, 3, rank=rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[1].scaled = False
        model(draw(4, 3, rank=rank)).square().mean().backward()
        before = [local(parameter).detach().clone() for parameter in model.parameters()]
        for _ in range(2):
            with pytest.raises(UnsupportedError) as caught:
                optimizer.step()
        assert all(torch.equal(local(p), q) for p, q in zip(model.parameters(), before, strict=True))
        # It goes on with a step of all.
        optimizer.zero_grad()
        model[1].scaled = True
        model(draw(4, 3, rank=rank)).square().mean().backward()
        optimizer.step()
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        assert "'1.scale'" in message
        assert f"rank {rank}" in message
        assert "model.parameters()" in message


def test_plain_sgd_takes_zeros_for_no_gradient() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    uses: Uses = [[{0, 1}], [set()], [{1}]]
    expected = partly_trained(make, uses)
    for found in flat_trained(make, uses):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "uses",
    [
        pytest.param([[{0, 1}], [{1}], [{0}]], id="one rank"),
        pytest.param([[set(), {1}], [{0}, set()], [set(), {0, 1}]], id="one of two backwards"),
    ],
)
def test_a_gradient_on_any_rank_in_any_backward_is_enough(uses: Uses) -> None:
    expected = partly_trained(adamw, uses)
    for found in flat_trained(adamw, uses):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
