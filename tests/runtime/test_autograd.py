"""Forwards and backwards in every order and number, against the same calls on unsharded models."""

from __future__ import annotations

import pytest
import torch
from parity import (
    Block,
    Net,
    assert_observed,
    assert_parity,
    draw,
    on_ranks,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    train_reference,
    units_of,
)
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}


class Branches(nn.Module):
    """Three heads on a trunk; a backward may reach any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block(3)
        self.heads = nn.ModuleList(Block(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


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
