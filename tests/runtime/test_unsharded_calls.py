"""Calling the model, or a unit of it, while its parameters are whole: it computes with what the user sees."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_all_close,
    assert_parity,
    draw,
    fake,
    is_sharded,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    units_of,
)
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
REFUSED = r"inside unsharded\(\) on rank \d"


class Translates(nn.Module):
    """Calls its encoder by itself, as an encoder-decoder's ``generate`` does, then every module of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.decoder = nn.Sequential(Block(), Block())
        self.head = nn.Linear(5, 4)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for _ in range(2):
            x = self.decoder(x + memory)
        return self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generate(x)


CALLS: dict[str, Callable[[Translates, torch.Tensor], torch.Tensor]] = {
    "model": lambda model, x: model(x),
    "unit": lambda model, x: cast("torch.Tensor", model.encoder[0](x)),
    "container": lambda model, x: cast("torch.Tensor", model.decoder(x)),
    "method": lambda model, x: model.generate(x),
}


@one_by_one(
    "call",
    CALLS,
    "strategy, world_size, writeback",
    [("full_shard", 3, True), ("full_shard", 2, False), ("shard_grad_op", 2, True), ("no_shard", 2, False)],
)
def test_calls_compute_with_the_whole_parameters_that_the_user_sees(
    call: str, strategy: str, world_size: int, writeback: bool
) -> None:
    model = cast("Translates", seeded(Translates))
    doubled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
    x = draw(4, 5)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, torch.Tensor]:
        mine = cast("Translates", sharded_copy(model, rank, world, **BLOCKS, strategy=strategy))
        polyshard.register_forward_method(mine, "generate")
        with polyshard.unsharded(mine, writeback=writeback):
            # Before the first forward that is sharded.
            torch.testing.assert_close(CALLS[call](mine, x), CALLS[call](model, x), rtol=0, atol=0)
        mine(x).sum().backward()
        mine.zero_grad()
        with polyshard.unsharded(mine, writeback=writeback):
            CALLS[call](mine, x)
            assert {name: parameter.shape for name, parameter in mine.named_parameters()} == shapes
            with torch.no_grad():
                for parameter in mine.parameters():
                    parameter.mul_(2.0)
                inside = CALLS[call](mine, x)
        assert root_of(mine).gathered == ()
        with torch.no_grad():
            return inside, CALLS[call](mine, x)

    outside = CALLS[call](doubled if writeback else model, x).detach()
    for got_inside, got_outside in on_ranks(world_size, on_rank):
        torch.testing.assert_close(got_inside, CALLS[call](doubled, x).detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_outside, outside, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", CALLS)
def test_one_rank_may_call_alone(call: str) -> None:
    model = cast("Translates", seeded(Translates))
    x = draw(4, 5)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = cast("Translates", sharded_copy(model, rank, world, **BLOCKS))
        with polyshard.unsharded(mine), torch.no_grad():
            outputs = [CALLS[call](mine, x)] if rank == 1 else []
        mine(x).sum().backward()
        return outputs

    _, (output,) = on_ranks(2, on_rank)
    torch.testing.assert_close(output, CALLS[call](model, x).detach(), rtol=1e-12, atol=1e-12)


def test_no_collective_is_issued_and_nothing_is_cast() -> None:
    model, collectives = seeded(Net).float(), fake()
    # One pretended rank of four gathers its own elements alone: the rest is not what the model had.
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, precision="bf16", **BLOCKS))
    x = draw(4, 3).float()
    assert model(x).dtype is torch.bfloat16
    dtypes: list[torch.dtype] = []
    for module in cast("Net", model).blocks:
        module.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    with polyshard.unsharded(model):
        collectives.calls.clear()
        output = model(x)
        cast("Net", model).blocks[1](output.new_zeros(2, 5))
        assert not collectives.calls
        expected = nn.functional.linear(x, cast("Net", model).first.weight, cast("Net", model).first.bias)
        torch.testing.assert_close(cast("Net", model).first(x), expected, rtol=0, atol=0)
    assert output.dtype is torch.float32
    assert dtypes == [torch.float32] * 4


@one_by_one(
    "call",
    CALLS,
    "inside, strategy, world_size",
    [(True, "full_shard", 2), (False, "full_shard", 2), (True, "no_shard", 1), (False, "no_shard", 2)],
)
def test_a_backward_through_such_a_call_is_refused_and_training_goes_on(
    call: str, inside: bool, strategy: str, world_size: int
) -> None:
    model = seeded(Translates)
    x = draw(4, 5)

    def step(mine: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = mine(draw(4, 5, turn=turn, rank=rank)).square().mean()
        loss.backward()
        return [loss.detach()]

    def step_after_refusal(mine: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if is_sharded(mine):
            if turn == 0:
                polyshard.register_forward_method(mine, "generate")
            with polyshard.unsharded(mine):
                loss = CALLS[call](cast("Translates", mine), x).sum()
                if inside:
                    with pytest.raises(StateError, match=REFUSED):
                        loss.backward()
            if not inside:
                with pytest.raises(StateError, match=REFUSED):
                    loss.backward()
            assert all(parameter.grad is None for parameter in mine.parameters())
        return step(mine, turn, rank)

    assert_parity(model, step_after_refusal, world_size, optimizer=adam, settings={**BLOCKS, "strategy": strategy})


def test_a_loss_of_calls_inside_and_outside_is_refused() -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if is_sharded(model):
            with polyshard.unsharded(model):
                inside = model(draw(4, 3)).sum()
            with pytest.raises(StateError, match=REFUSED):
                (inside + model(draw(4, 3)).sum()).backward()
            # The other call's backward came first.
            assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
            model.zero_grad()
        return square_step(model, turn, rank)

    assert_parity(seeded(Net), step, 2, settings=BLOCKS)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_backward_through_a_parameter_itself_is_refused_where_it_would_fill_grad(strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        net = cast("Net", model)
        if is_sharded(model):
            with polyshard.unsharded(model):
                # No unit of its own, and a plain function: nothing of theirs is watched.
                for use in (net.first(draw(4, 3)).sum(), net.blocks[0].up.weight.square().sum()):
                    with pytest.raises(StateError, match=r"inside unsharded\(\).*'(first|blocks\.0\.up)\.\w+'"):
                        use.backward()
                weight = net.blocks[0].up.weight
                (gradient,) = torch.autograd.grad(weight.square().sum(), weight)
                torch.testing.assert_close(gradient, 2 * weight.detach(), rtol=1e-12, atol=1e-12)
            assert all(parameter.grad is None for parameter in model.parameters())
        return square_step(model, turn, rank)

    assert_parity(seeded(Net), step, 2, settings={**BLOCKS, "strategy": strategy})


def test_a_call_that_raises_leaves_the_parameters_whole() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        mine = cast("Net", sharded_copy(model, rank, world, **BLOCKS))
        with polyshard.unsharded(mine):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                mine.blocks[0](draw(4, 3))
            output = mine(draw(4, 3)).detach()
        square_step(mine, 0, rank)
        return output

    assert_all_close(on_ranks(2, on_rank), model(draw(4, 3)).detach())


@pytest.mark.slow
@one_by_one("strategy", ["full_shard", "shard_grad_op", "no_shard"], "policy", [units_of(Block), "always"])
def test_a_backward_of_a_forward_before_it_is_not_disturbed(policy: Any, strategy: str) -> None:
    def loss_of(model: nn.Module, x: torch.Tensor, turn: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        if is_sharded(model):
            with polyshard.unsharded(model), torch.no_grad():
                model(draw(4, 3))
                cast("Net", model).blocks[1](draw(4, 5))
        return loss

    settings = {"policy": policy, "strategy": strategy}
    assert_parity(seeded(Net), stepping(loss_of), 2, optimizer=adam, settings=settings)
