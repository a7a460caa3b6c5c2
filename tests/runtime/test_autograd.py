"""Forwards and backwards in every order and number, against the same calls on unsharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    Words,
    adam,
    assert_all_close,
    assert_observed,
    assert_parity,
    draw,
    on_ranks,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    train_reference,
    units_of,
    warns_for,
)
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_several_forwards_before_one_backward(world_size: int, strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = [draw(4, 3, turn=turn + 10 * k, rank=rank, requires_grad=True) for k in range(3)]
        loss = sum((model(each).square().mean() for each in x), torch.zeros((), dtype=torch.float64))
        loss.backward()
        return [loss.detach(), *(each.grad for each in x if each.grad is not None)]

    assert_parity(seeded(Net), step, world_size, settings={**BLOCKS, "strategy": strategy})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("integer", [False, True])
def test_two_forwards_then_two_backwards(order: tuple[int, int], strategy: str, integer: bool) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = []
        for k in range(2):
            x = draw(2, 3, turn=turn + 10 * k, rank=rank)
            losses.append(model((x * 100).long() % 11 if integer else x).square().mean())
        for index in order:
            losses[index].backward()
        return [loss.detach() for loss in losses]

    assert_parity(seeded(Words if integer else Net), step, optimizer=adam, settings={**BLOCKS, "strategy": strategy})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_forward_without_gradient_between_forward_and_backward(strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x).square().mean()
        with torch.no_grad():
            teacher = model(x * 2)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, teacher]

    assert_parity(seeded(Net), step, settings={**BLOCKS, "strategy": strategy})


class Branches(nn.Module):
    """Three heads on a trunk; a backward may reach any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block(3)
        self.heads = nn.ModuleList(Block(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@pytest.mark.parametrize("policy", [units_of(Block), "never", "always"])
def test_backward_of_part_of_the_outputs(policy: Any) -> None:
    step = stepping(lambda model, x, turn, rank: model(x)[turn].square().mean())
    assert_parity(seeded(Branches), step, turns=3, settings={"policy": policy})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_backwards_through_a_retained_graph(world_size: int, strategy: str) -> None:
    """Of one output after the other, and of the last one twice."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        losses = [output.square().mean() for output in model(x)]
        for loss in [*losses, losses[-1]]:
            loss.backward(retain_graph=True)
        assert x.grad is not None
        return [*(loss.detach() for loss in losses), x.grad]

    assert_parity(seeded(Branches), step, world_size, settings={**BLOCKS, "strategy": strategy})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_backward_to_parameters_that_are_named_gives_gradients_to_these_alone(strategy: str) -> None:
    def named(model: Any, rank: int, backward: Callable[..., None] = torch.autograd.backward) -> list[Any]:
        x = draw(4, 3, rank=rank, requires_grad=True)
        given = [model.last.weight, model.blocks[1].down.weight, x]
        backward(model(x).square().mean(), inputs=given)
        return [each.grad for each in (*given, model.last.bias, model.blocks[0].down.weight)]

    models = [seeded(Net), seeded(Net)]
    last, inner, of_x, *others = zip(*(named(model, rank) for rank, model in enumerate(models)), strict=True)
    expected = [(one + other) / 2 for one, other in (last, inner)]

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(seeded(Net), rank, world, **{**BLOCKS, "strategy": strategy})
        weight, deeper, x, *rest = named(mine, rank, polyshard.backward)
        torch.testing.assert_close(x, of_x[rank], rtol=1e-12, atol=1e-12)
        assert rest == [None, None]
        return [weight.full_tensor(), deeper.full_tensor()]

    assert others == [(None, None)] * 2
    assert_all_close(on_ranks(2, on_rank), expected)


def grad_of_input(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, x)[0]


def backward_into_input(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("differentiate", [grad_of_input, backward_into_input])
def test_gradients_of_inputs_alone_touch_no_parameter(
    differentiate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], world_size: int, strategy: str
) -> None:
    model = seeded(Net)
    settings = {**BLOCKS, "strategy": strategy}

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mine = sharded_copy(model, rank, world, **settings)
        x = draw(4, 3, rank=rank, requires_grad=True)
        gradient = differentiate(mine(x).square().mean(), x)
        assert all(parameter.grad is None for parameter in mine.parameters())
        assert root_of(mine).gathered == ()
        return gradient, square_step(mine, 0, rank)

    expected = train_reference(model, square_step, world_size, turns=1).observed[0]
    with warns_for(world_size):
        ranks = on_ranks(world_size, on_rank)
    for (gradient, after), reference in zip(ranks, expected, strict=True):
        torch.testing.assert_close(gradient, reference[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_of_parameters_with_a_graph_are_refused_and_the_model_goes_on() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        x = draw(4, 3, rank=rank, requires_grad=True)
        with pytest.raises(
            StateError, match=r"reached '\(root\)' on rank \d.*torch.autograd.grad\(outputs, inputs, create"
        ):
            mine(x).square().mean().backward(create_graph=True)
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


class Twice(nn.Module):
    """One block used twice, and one parameter used twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.block = Block()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.first(x))
        x = self.block(self.other(x))
        return x @ self.first.weight


@pytest.mark.parametrize("policy", [units_of(Block), "never", "always"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_module_used_twice_and_a_parameter_used_twice(policy: Any, strategy: str) -> None:
    class Root(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # `always` makes a unit of the linear layer, whose weight is not to be read outside of it.
            x = self.block(self.first(x))
            x = self.block(self.other(x))
            return self.first(x[:, :3])

    chosen = Root if policy == "always" else Twice
    assert_parity(seeded(chosen), settings={"policy": policy, "strategy": strategy}, optimizer=adam)


class Skips(nn.Module):
    """A unit that every rank enters, but whose parameters only some use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.linear(x) if use else x


@pytest.mark.parametrize("at", ["first", "middle", "last"])
@pytest.mark.parametrize("with_input_gradient", [True, False])
def test_a_unit_whose_parameters_are_used_on_one_rank_only(at: str, with_input_gradient: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skips = Skips()
            self.one, self.two = Block(), Block()

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            if at == "first":
                return self.two(self.one(self.skips(x, use)))
            if at == "middle":
                return self.two(self.skips(self.one(x), use))
            return self.skips(self.two(self.one(x)), use)

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=with_input_gradient)
        loss = model(x, use=rank == turn % 2).square().mean()
        loss.backward()
        return [loss.detach(), *([x.grad] if x.grad is not None else [])]

    assert_parity(seeded(Root), step, world_size=2, settings={"policy": units_of(Block, Skips)})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_parameters_used_nowhere_for_nothing_and_on_one_rank(strategy: str) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.ones(4))
            self.spare = Block()
            self.wasted = Block(3)
            self.extra = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
            self.wasted(x)
            return super().forward(self.extra(x) if rank == 1 else x)

    step = stepping(lambda model, x, turn, rank: model(x, rank).square().mean(), grad=False)
    assert_parity(seeded(Unused), step, settings={**BLOCKS, "strategy": strategy})


def test_a_parameter_on_a_branch_beside_the_input() -> None:
    """Its gradient can come after all of those between output and input."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.table = nn.Parameter(torch.arange(15.0).reshape(3, 5) / 15)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            # Made before the input was touched, and long on its way.
            branch = self.table.exp().sin().cumsum(0)
            for _ in range(5):
                branch = branch * 0.9
            return y + branch.sum(0)

    class Early(Beside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            branch = self.table.exp().sin().cumsum(0).sum(0)
            return self.linear(x) + branch

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.late, self.early = Beside(), Early()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.early(self.late(self.first(x)))

    assert_parity(seeded(Root), settings={"policy": units_of(Beside, Early)})


def test_a_cached_computation_on_parameters_outlives_the_unit_s_own_backward() -> None:
    """The second unit's input does not depend on the first's parameters alone."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 5))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, self.weight.square()

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.gate = Gate()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, penalty = self.gate(self.first(x))
            return self.block(x) + penalty

    assert_parity(seeded(Root), settings={"policy": units_of(Block, Gate)})


def test_gradients_through_two_sharded_models_in_one_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        one = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        two = sharded_copy(seeded(Block), rank, world)
        x = draw(4, 3, rank=rank, requires_grad=True)
        loss = two(torch.cat([one(x), x], dim=1)).square().mean()
        loss.backward()
        assert root_of(one).gathered == root_of(two).gathered == ()
        assert x.grad is not None
        assert all(p.grad is not None for each in (one, two) for p in each.parameters())
        return [loss.detach(), x.grad]

    one, two = seeded(Net), seeded(Block)
    for rank, values in enumerate(on_ranks(2, on_rank)):
        x = draw(4, 3, rank=rank, requires_grad=True)
        loss = two(torch.cat([one(x), x], dim=1)).square().mean()
        loss.backward()
        torch.testing.assert_close(values, [loss.detach(), x.grad], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_autocast_around_forward_computes_in_bfloat16_with_float32_shards(strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank).float()
        # One thread's leaving would clear the cache of all: it belongs to the process.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            first = model(x)
            second = model(x)
        assert first.dtype == torch.bfloat16
        loss = first.float().square().mean() + second.float().abs().mean()
        loss.backward()
        return [loss.detach()]

    # Ranks add float32 gradients in another order than the reference: a few units in the last place.
    assert_parity(seeded(Net).float(), step, world_size=2, settings={**BLOCKS, "strategy": strategy}, tolerance=1e-6)
