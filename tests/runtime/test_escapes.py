"""Memory of a unit that leaves it, and outputs that cannot be found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    Block,
    assert_observed,
    draw,
    mean_square,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    train_reference,
    units_of,
)
from polyshard.errors import UnshardedUseError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


class Leaks(nn.Module):
    """Returns its own weight, or a view of it, on request."""

    leaks = "no"

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.two(self.one(x))
        if self.leaks == "weight":
            return y, self.two.weight
        if self.leaks == "view":
            return {"y": y, "row": self.two.weight[1]}
        if self.leaks == "detached":
            return y, self.two.weight.detach().t()
        return y


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.unit = Leaks()

    def forward(self, x: torch.Tensor) -> Any:
        return self.unit(self.first(x))


@one_by_one(
    "strategy", ["full_shard", "shard_grad_op"], "leaks", ["weight", "view", "detached"], "train", [True, False]
)
def test_a_unit_that_returns_its_own_weight_is_refused_by_name(leaks: str, train: bool, strategy: str) -> None:
    """By itself or, where it is kept for its backward, by the outermost module."""
    model = seeded(Around)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Leaks), strategy=strategy)
        mine.unit.leaks = leaks
        with torch.set_grad_enabled(train), pytest.raises(UnshardedUseError, match=r"'unit\.two\.weight'") as caught:
            mine(draw(4, 3))
        assert f"rank {rank}" in str(caught.value)
        assert root_of(mine).gathered == ()
        mine.unit.leaks = "no"
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("leaks", ["weight", "view"])
def test_an_outermost_module_that_returns_its_own_weight_is_refused_by_name(leaks: str, strategy: str) -> None:
    model = seeded(Leaks)

    step = stepping(mean_square, 4, 5, grad=False)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, strategy=strategy)
        mine.leaks = leaks
        with pytest.raises(UnshardedUseError, match=r"'two\.weight'"):
            mine(draw(4, 5))
        assert root_of(mine).gathered == ()
        mine.leaks = "no"
        return step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, step, 2, turns=1))


@pytest.mark.parametrize("hides", [lambda y: lambda: y, lambda y: (each for each in [y])])
def test_a_backward_through_an_output_that_cannot_be_found_raises_and_trains_nothing(
    hides: Callable[[torch.Tensor], Any],
) -> None:
    class Hides(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return hides(super().forward(x))

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hiding = nn.Linear(3, 5), Hides()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.hiding(self.first(x))
            return hidden() if callable(hidden) else next(hidden)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(Root), rank, world, policy=units_of(Hides))
        loss = mine(draw(4, 3)).square().mean()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1\d{9};"):
            loss.backward()
        assert all(parameter.grad is None for parameter in mine.hiding.parameters())

    on_ranks(2, on_rank)
