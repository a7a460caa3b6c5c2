"""What leaves a unit beside its output, against the same on unsharded models: tensors, and writes into containers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    adam,
    assert_observed,
    assert_parity,
    chain,
    draw,
    mean_square,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sgd,
    sharded_copy,
    square_step,
    stepping,
    train_reference,
    units_of,
)
from polyshard.errors import StateError, UnshardedUseError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


class Keeping(Block):
    """Computes a loss of its own behind its output, as routers of mixtures do, and lets ``leave`` take it out."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(5, 5)
        self.seen: torch.Tensor | None = None
        self.probe.register_forward_hook(self.see)

    def see(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.seen = torch.tanh(self.down(self.up(output))).square().mean()

    def forward(self, x: torch.Tensor, leave: Callable[..., Any]) -> Any:
        y = super().forward(x)
        loss = torch.tanh(self.down(self.up(torch.tanh(self.down(self.up(x)))))).square().mean()
        self.probe(y)
        return leave(self, y, loss)


#: Lets a loss leave, and says where it went: ``way(calls)`` returns ``leave`` and ``found``.
Way = Callable[[], tuple[Callable[..., Any], Callable[["Root"], list[torch.Tensor]]]]


def through(take: Callable[[Keeping, torch.Tensor, torch.Tensor], Any], find: Callable[[Keeping], Any]) -> Way:
    """A way through each block itself."""
    return lambda: (
        lambda block, y, loss: (take(block, y, loss), y)[1],
        lambda root: [find(block) for block in root.blocks],
    )


def by_attribute_of_the_tensor() -> Any:
    def leave(block: Keeping, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        # Of a view as well.
        y = y.view(2, 2, 5).view(4, 5) if block.training else y
        y.loss = loss  # type: ignore[attr-defined]
        return y

    return leave, lambda root: [y.loss for y in root.outputs]


def by_list() -> Any:
    found: list[torch.Tensor] = []
    return (lambda block, y, loss: (found.append(loss), y)[1]), lambda root: found


def by_context_variable() -> Any:
    variable: ContextVar[tuple[torch.Tensor, ...]] = ContextVar("losses", default=())

    def leave(block: Keeping, y: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        variable.set((*variable.get(), loss))
        return y

    return leave, lambda root: list(variable.get())


def by_returned_function() -> Any:
    return (lambda block, y, loss: (y, lambda: loss)), lambda root: [call() for call in root.calls]


WAYS: dict[str, Way] = {
    "an attribute": through(lambda block, y, loss: setattr(block, "balance", loss), lambda block: block.balance),
    "a hook of the user's inside": through(lambda block, y, loss: None, lambda block: block.seen),
    "a list": by_list,
    "an attribute of the tensor": by_attribute_of_the_tensor,
    "a context variable": by_context_variable,
    "a function that is returned": by_returned_function,
}


class Root(nn.Module):
    """Blocks one behind the other, whose losses are a part of its own."""

    def __init__(self, way: Way, with_output: bool = True) -> None:
        super().__init__()
        self.way, self.with_output = way, with_output
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList(Keeping() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leave, found = self.way()
        self.outputs: list[torch.Tensor] = []
        self.calls: list[Any] = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x, leave)
            if isinstance(x, tuple):
                x, call = x
                self.calls.append(call)
            self.outputs.append(x)
        loss: torch.Tensor = self.last(x).square().mean()
        return (loss if self.with_output else loss.detach()) + sum(found(self))


def loss_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    loss = model(draw(4, 3, turn=turn, rank=rank))
    loss.backward()
    return [loss.detach()]


@pytest.mark.parametrize(("index", "way"), list(enumerate(WAYS)))
def test_a_loss_leaves_a_unit_by(index: int, way: str) -> None:
    """Gathers that come late are waited for, and those that come early are of no use to it."""
    settings = {"policy": units_of(Keeping), "backward_prefetch": index % 2}
    assert_parity(seeded(lambda: Root(WAYS[way])), loss_step, world_size=2, settings=settings, optimizer=adam)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_backward_through_nothing_else_is_refused_where_parameters_were_released(strategy: str) -> None:
    model = seeded(lambda: Root(WAYS["an attribute"], with_output=False))
    settings = {"policy": units_of(Keeping), "strategy": strategy}
    if strategy == "shard_grad_op":
        assert_parity(model, loss_step, world_size=2, settings=settings)
        return

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, **settings)
        loss = mine(draw(4, 3))
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1\d{9}; expected"):
            loss.backward()
        assert all(parameter.grad is None for parameter in mine.parameters())
        mine.with_output = True
        return loss_step(mine, 0, rank)

    model.with_output = True
    expected = train_reference(model, loss_step, 2, turns=1)
    model.with_output = False
    assert_observed(on_ranks(2, on_rank), expected)


class Aside(nn.Module):
    """Keeps a loss, of which its output knows nothing."""

    loss: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(3, 5), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(self.first(x))
        self.loss = self.first(x).square().mean()
        return y


@pytest.mark.parametrize("found_by", ["the optimizer", "the next forward"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_gradients_that_came_past_all_outputs_are_refused_where_parameters_were_kept(
    strategy: str, found_by: str
) -> None:
    model = seeded(Aside)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine: Any = sharded_copy(model, rank, world, policy=units_of(Block), strategy=strategy)
        optimizer = sgd(mine)
        mine(draw(4, 3))
        mine.loss.backward()
        with pytest.raises(StateError, match=r"gave '\(root\)' and 0 other units gradients .*\(rank \d\)"):
            optimizer.step() if found_by == "the optimizer" else mine(draw(4, 3))
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


@pytest.mark.parametrize("flat", [False, True])
def test_a_graph_from_before_a_step_is_refused_as_on_an_unsharded_model(flat: bool) -> None:
    """Parameters that are gathered again hold other values than those that the graph saved."""

    def twice(model: nn.Module, rank: int, parameters: Any) -> None:
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        loss = model(draw(4, 3, rank=rank)).square().mean()
        loss.backward(retain_graph=True)
        # The same values: another microbatch's backward, say.
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*; expected version"):
            loss.backward()

    model = seeded(lambda: nn.Sequential(nn.Linear(3, 5), Block(), Block(), nn.Linear(5, 2)))

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Block))
        twice(mine, rank, polyshard.flat_parameters(mine) if flat else mine.parameters())
        return square_step(mine, 1, rank)

    losses = [loss for loss, _ in on_ranks(2, on_rank)]
    twice(model, 0, model.parameters())
    assert all(loss.isfinite() for loss in losses)


class Fields(OrderedDict[str, Any]):
    """A mapping with a class of its own."""


@dataclasses.dataclass
class Record:
    losses: list[torch.Tensor]
    last: torch.Tensor | None = None
    count: int = 0


class Writes(Block):
    """Writes into everything that it is given, beside tensors that need a gradient."""

    def forward(self, x: torch.Tensor, *given: Any, fields: Fields, record: Record, nested: Any) -> torch.Tensor:
        y = super().forward(x)
        loss = self.up(x).square().mean()
        losses, named = given
        losses.append(loss)
        losses.sort(key=torch.Tensor.item)
        losses[0] = losses[0] * 2
        named["last"], named[str(len(losses))] = y, loss
        named.pop("gone", None)
        fields["y"] = fields.pop("x", 0 * y) + y
        record.losses.append(loss)
        record.last, record.count = y, record.count + 1
        nested[0]["deep"][0].append(loss)
        nested[1].extend([y, loss])
        return y


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Writes() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        losses, named = [x.mean()], {"gone": x, "x": x}
        fields, record = Fields(x=x), Record([x.sum()], x)
        nested: Any = {"deep": ([x.mean()], x)}, [x]
        for block in self.blocks:
            x = block(x, losses, named, fields=fields, record=record, nested=nested)
        # The first of them, and what each block wrote.
        assert (len(losses), sorted(named), list(fields)) == (4, ["2", "3", "4", "last", "x"], ["y"])
        assert (len(record.losses), record.count, len(nested[0]["deep"][0]), len(nested[1])) == (4, 3, 4, 7)
        assert named["last"] is record.last is x
        tensors = [*losses, *named.values(), *fields.values(), *record.losses, *nested[0]["deep"][0], *nested[1]]
        return torch.stack([tensor.square().mean() for tensor in tensors]).sum()


def test_writes_into_containers_that_a_unit_is_given() -> None:
    assert_parity(seeded(Collects), loss_step, world_size=2, settings={"policy": units_of(Writes)}, optimizer=sgd)


def test_containers_whose_tensors_are_cast_on_the_way() -> None:
    """What was in them keeps its dtype, and what a unit writes has that of its compute."""
    model = seeded(Collects).float()

    def on_rank(rank: int, world: ThreadedWorld) -> float:
        mine = sharded_copy(model, rank, world, policy=units_of(Writes), precision="bf16")
        return float(mine(draw(4, 3, rank=rank).float()).detach())

    for rank, total in enumerate(on_ranks(2, on_rank)):
        assert total == pytest.approx(float(model(draw(4, 3, rank=rank).float()).detach()), rel=0.03)


# Memory of a unit that leaves it, and outputs that cannot be found.


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


@one_by_one(
    "strategy", ["full_shard", "shard_grad_op"], "leaks", ["weight", "view", "detached"], "train", [True, False]
)
def test_a_unit_that_returns_its_own_weight_is_refused_by_name(leaks: str, train: bool, strategy: str) -> None:
    """By itself or, where it is kept for its backward, by the outermost module."""
    model = seeded(lambda: chain(first=nn.Linear(3, 5), unit=Leaks()))

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
