"""Memory and graphs that leave a unit by other ways than its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    Block,
    assert_observed,
    assert_parity,
    draw,
    mean_square,
    on_ranks,
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


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("leaks", ["weight", "view", "detached"])
@pytest.mark.parametrize("train", [True, False])
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


class Router(nn.Module):
    """A unit that keeps a loss of its own as an attribute, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        self.balance = torch.tanh(self.router(torch.tanh(self.router(x)))).square().mean()
        return y


@pytest.mark.parametrize(("prefetch", "strategy"), [(0, "full_shard"), (1, "full_shard"), (1, "shard_grad_op")])
@pytest.mark.parametrize(("read_by", "with_output"), [("root", True), ("root", False), ("user", True)])
def test_a_loss_kept_as_an_attribute(read_by: str, with_output: bool, prefetch: int, strategy: str) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
            self.routers = nn.Sequential(Router(), Router())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.last(self.routers(self.first(x))).square().mean()
            loss = loss if with_output else loss.detach()
            return loss + self.routers[0].balance + self.routers[1].balance if read_by == "root" else loss

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank))
        if read_by == "user":
            loss = loss + model.routers[0].balance + model.routers[1].balance
        loss.backward()
        return [loss.detach()]

    settings = {"policy": units_of(Router), "backward_prefetch": prefetch, "strategy": strategy}
    assert_parity(seeded(Root), step, world_size=2, settings=settings)


class LateRouter(Router):
    """Keeps its loss under ``name``, from the second forward on."""

    def __init__(self, name: str, blank: object = None) -> None:
        super().__init__()
        self.name, self.forwards = name, 0
        if name.endswith("blank"):
            setattr(self, name, blank)
        if name.startswith("registered"):
            self.register_buffer(name, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        balance, self.balance = self.balance, torch.zeros(())
        self.forwards += 1
        if self.forwards > 1:
            setattr(self, self.name, [balance] if self.name.endswith("list") else balance)
        return y

    def loss(self) -> torch.Tensor | float:
        kept = getattr(self, self.name, None) or 0.0
        return kept[0] if isinstance(kept, list) else kept


@pytest.mark.parametrize(("alone", "strategy"), [(False, "full_shard"), (True, "shard_grad_op")])
@pytest.mark.parametrize(
    ("name", "blank"),
    [
        ("new", None),
        ("_new", None),
        ("blank", None),
        ("_blank", None),
        ("blank", 0.0),
        ("new_list", None),
        ("registered", None),
    ],
)
def test_a_loss_that_appears_under_a_new_or_private_name_in_a_later_forward(
    name: str, blank: object, alone: bool, strategy: str
) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
            self.routers = nn.Sequential(LateRouter(name, blank), LateRouter(name, blank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.routers(self.first(x))).square().mean()

    def step(model: Any, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank))
        late = model.routers[0].loss() + model.routers[1].loss()
        # Through nothing but what is kept.
        total = late if alone and turn else loss + late
        total.backward()
        return [total.detach()]

    assert_parity(seeded(Root), step, world_size=2, settings={"policy": units_of(LateRouter), "strategy": strategy})


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
        # Autograd itself may be the first to stumble over the released memory.
        with pytest.raises(RuntimeError, match=r"'hiding' on rank \d without coming through|storage of size 0"):
            loss.backward()
        assert all(parameter.grad is None for parameter in mine.hiding.parameters())

    on_ranks(2, on_rank)
