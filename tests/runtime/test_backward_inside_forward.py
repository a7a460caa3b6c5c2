"""Backwards that run inside of a sharded module's forward, against the same calls on unsharded models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
    seeded,
    sharded_copy,
    square_step,
    train_reference,
    units_of,
    whole_of,
)
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = units_of(Block)


class Inside(Net):
    """Computes gradients of its loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x)
        loss.backward()
        return loss.detach()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return Inside.forward(self, x)


class OwnAlone(Inside):
    """Of parameters alone that are no block's: no tensor that a unit returned is on the way."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))).square().mean()


class Uneven(OwnAlone):
    """Ranks whose gradients come through blocks, and ranks where none does."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        own, all_of_it = super().loss(x), Inside.loss(self, x)
        return own if x.shape[0] == 4 else all_of_it


class Penalised(OwnAlone):
    """A gradient penalty: the loss holds the gradient of its inputs."""

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        value = super().loss(x)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        return value + slope.square().sum()


def call(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    output = model(draw(4 + rank, 3, turn=turn, rank=rank))
    if output.requires_grad:
        output.square().mean().backward()
    return [output.detach()]


STRATEGIES, MAKERS = ["full_shard", "shard_grad_op", "no_shard"], [OwnAlone, Uneven, Penalised]


@one_by_one("strategy", STRATEGIES, "policy", [BLOCKS, "never"], "make", MAKERS)
def test_a_forward_that_computes_its_own_gradients(make: type[nn.Module], policy: Any, strategy: str) -> None:
    assert_parity(seeded(make), call, 2, turns=2, settings={"policy": policy, "strategy": strategy})


class Judged(Net):
    """Its forward trains another model on what it makes, and asks a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.others: Sequence[nn.Module] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        critic, frozen = self.others
        wide = torch.cat([made, x], dim=1)
        critic(wide.detach()).square().mean().backward()
        return torch.stack([made.square().mean(), frozen(wide).mean()])


@pytest.mark.parametrize("whole", ["", "critic", "made"])
def test_other_models_inside_of_the_forward(whole: str) -> None:
    """``whole``: which model is not sharded, if any."""
    models = seeded(Judged), seeded(Block, seed=1), seeded(Block, seed=2).requires_grad_(False)

    def play(made: Judged, critic: nn.Module, frozen: nn.Module, rank: int) -> list[torch.Tensor]:
        made.others = (critic, frozen)
        losses = []
        for turn in range(2):
            loss = made(draw(4, 3, turn=turn, rank=rank)).sum()
            loss.backward()
            losses.append(loss.detach())
        return losses

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
        mine = []
        for name, model in zip(("made", "critic", "frozen"), models, strict=True):
            if name == whole:
                with world.lock:
                    mine.append(copy.deepcopy(model))
            else:
                mine.append(sharded_copy(model, rank, world, policy=BLOCKS))
        losses = play(*mine, rank)
        return losses, [{k: p.grad for k, p in each.named_parameters() if p.grad is not None} for each in mine[:2]]

    copies = [[copy.deepcopy(each) for each in models] for _ in range(2)]
    losses = [play(*each, rank) for rank, each in enumerate(copies)]
    found = on_ranks(2, on_rank)
    for rank in range(2):
        torch.testing.assert_close(found[rank][0], losses[rank], rtol=1e-12, atol=1e-12)
    for number, name in enumerate(("made", "critic")):
        for key, parameter in copies[0][number].named_parameters():
            grads = [dict(each[number].named_parameters())[key].grad for each in copies]
            got = [gradients[number][key] for _, gradients in found]
            assert grads[0] is not None
            assert grads[1] is not None
            if name == whole:
                torch.testing.assert_close(got, grads, rtol=1e-12, atol=1e-12)
            else:
                mean = (grads[0] + grads[1]) / 2
                torch.testing.assert_close(whole_of(parameter, got), mean, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_backward_inside_are_clipped_there() -> None:
    class Clips(OwnAlone):
        optimizer: torch.optim.Optimizer
        backward = staticmethod(torch.autograd.backward)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.loss(x)
            self.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], 0.01)
            self.optimizer.step()
            return loss.detach()

    def train(model: Clips) -> list[torch.Tensor]:
        model.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return [model(draw(4, 3, turn=turn)) for turn in range(3)]

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(seeded(Clips), rank, world, policy=BLOCKS)
        mine.backward = polyshard.backward
        return train(mine)

    expected = train(seeded(Clips))
    assert_all_close(on_ranks(2, on_rank), expected)


def test_an_optimizer_may_step_inside_once_and_no_backward_may_follow() -> None:
    class Steps(OwnAlone):
        optimizer: torch.optim.Optimizer

        def forward(self, x: torch.Tensor, steps: int = 1) -> torch.Tensor:
            for _ in range(steps):
                loss = self.loss(x)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss.detach()

    def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
        return [model(draw(4, 3, turn=turn)) for turn in range(3)]

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(seeded(Steps), rank, world, policy=BLOCKS)
        mine.optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
        losses = train(mine, rank)
        with pytest.raises(StateError, match=r"behind an optimizer's step inside of one forward of '\(root\)' \(rank"):
            mine(draw(4, 3, turn=3), steps=2)
        mine.optimizer.zero_grad()
        return [*losses, mine(draw(4, 3, turn=4))]

    plain = seeded(Steps)
    plain.optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = train(plain, 0)
    # The first step of those that were refused was made.
    plain(draw(4, 3, turn=3))
    expected.append(plain(draw(4, 3, turn=4)))
    assert expected[0] > expected[2]
    assert_all_close(on_ranks(2, on_rank), expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_gradients_of_gradients_inside_are_refused_and_the_model_goes_on() -> None:
    class Twice(OwnAlone):
        refuses = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.refuses:
                self.loss(x).backward(create_graph=True)
            return Net.forward(self, x)

    model = seeded(Twice)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=BLOCKS)
        mine.refuses = True
        with pytest.raises(StateError, match=r"create_graph=True\) reached 'first\.weight' on rank"):
            mine(draw(4, 3))
        mine.refuses = False
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))
