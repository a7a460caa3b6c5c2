"""Activation checkpointing of both kinds in every place, against the unsharded model under the same checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    Block,
    assert_parity,
    draw,
    mean_square,
    on_ranks,
    root_of,
    seeded,
    sharded_copy,
    stepping,
    units_of,
)
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BLOCKS = {"policy": units_of(Block)}


class Inside(Block):
    """A unit that checkpoints a part of itself."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), x, use_reentrant=self.reentrant)


class Checkpointed(nn.Module):
    """A stack of units; ``arrangement`` says where checkpoints lie."""

    def __init__(self, arrangement: str, reentrant: bool) -> None:
        super().__init__()
        self.arrangement, self.reentrant = arrangement, reentrant
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Inside() if arrangement == "inside" else Block() for _ in range(4))
        for block in self.blocks:
            block.reentrant = reentrant
        self.last = nn.Linear(5, 2)

    def _checkpoint(self, function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(function, *args, use_reentrant=self.reentrant)
        return output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.blocks
        x = self.first(x)
        if self.arrangement == "around":
            for block in self.blocks:
                x = self._checkpoint(block, x)
        elif self.arrangement == "some":
            x = d(self._checkpoint(c, b(self._checkpoint(a, x))))
        elif self.arrangement == "spanning":
            x = self._checkpoint(lambda y: b(a(y)), x)
            x = self._checkpoint(lambda y: d(c(y)), x)
        elif self.arrangement == "nested":
            x = self._checkpoint(lambda y: self._checkpoint(b, self._checkpoint(a, y)), x)
            x = self._checkpoint(lambda y: d(self._checkpoint(c, y)), x)
        elif self.arrangement == "twice":
            x = self._checkpoint(lambda y: a(b(a(y))), x)
            x = d(c(x))
        elif self.arrangement == "root's own":
            x = self._checkpoint(lambda y: torch.tanh(a(y) @ self.first.weight @ self.first.weight.t()), x)
            x = d(c(b(x)))
        else:
            for block in self.blocks:
                x = block(x)
        return self.last(x)


# Torch's word on a re-entrant checkpoint inside a re-entrant one, whose first forward runs without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

ARRANGEMENTS = ["around", "some", "inside", "spanning", "nested", "twice", "root's own"]


step = stepping(mean_square)


@pytest.mark.parametrize(
    ("arrangement", "reentrant", "strategy"),
    [
        (arrangement, reentrant, ("full_shard", "shard_grad_op", "no_shard")[(index + turn) % 3])
        for index, arrangement in enumerate(ARRANGEMENTS)
        for turn, reentrant in enumerate([False, True])
    ],
)
def test_checkpoints_inside_the_sharded_model(arrangement: str, reentrant: bool, strategy: str) -> None:
    assert_parity(
        seeded(lambda: Checkpointed(arrangement, reentrant)),
        step,
        world_size=2,
        turns=2,
        settings={"policy": units_of(Block, Inside), "strategy": strategy},
    )


def test_a_first_unit_under_a_checkpoint_whose_input_needs_no_gradient() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(checkpoint(self.one, x, use_reentrant=False))

    plain = stepping(mean_square, 4, 5, grad=False)

    assert_parity(seeded(Root), plain, settings=BLOCKS)


def test_selective_checkpointing() -> None:
    def keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        matmuls = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if operator in matmuls else CheckpointPolicy.PREFER_RECOMPUTE

    class Root(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(keeps_products),
                )
            return self.last(x)

    assert_parity(seeded(lambda: Root("none", False)), step, world_size=2, settings=BLOCKS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_error_in_the_recomputation_leaves_the_next_step_right(reentrant: bool) -> None:
    class RecomputationError(Exception):
        pass

    class Root(Checkpointed):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls = 0
            x = self.first(x)

            def watched(y: torch.Tensor) -> torch.Tensor:
                nonlocal calls
                calls += 1
                y = self.blocks[1](y)
                if self.fails and calls > 1:
                    raise RecomputationError
                return self.blocks[2](y)

            x = self.blocks[3](self._checkpoint(watched, self.blocks[0](x)))
            return self.last(x)

    def failing(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if turn == 1:
            model.fails = True
            with pytest.raises(RecomputationError):
                step(model, turn, rank)
            model.fails = False
            # What a backward that raised left in .grad is undefined, unsharded too.
            model.zero_grad()
        return step(model, turn, rank)

    assert_parity(seeded(lambda: Root("none", reentrant)), failing, world_size=2, settings=BLOCKS)


def test_nothing_stays_gathered_between_a_checkpointed_forward_and_its_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(lambda: Checkpointed("around", False)), rank, world, **BLOCKS)
        loss = mine(draw(4, 3)).square().mean()
        # The outermost unit stays for its backward, which follows at once.
        assert root_of(mine).gathered == ("(root)",)
        with contextlib.suppress(RuntimeError):
            loss.backward()
        assert root_of(mine).gathered == ()

    on_ranks(2, on_rank)
