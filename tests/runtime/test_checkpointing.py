"""Activation checkpointing of both kinds in every place, against the unsharded model under the same checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import (
    Block,
    adam,
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

Run = Callable[..., torch.Tensor]


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


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arrangement", ["around", "spanning", "inside"])
def test_checkpoints_with_every_module_a_unit(arrangement: str, reentrant: bool) -> None:
    assert_parity(
        seeded(lambda: Checkpointed(arrangement, reentrant)),
        step,
        world_size=3,
        optimizer=adam,
        settings={"policy": "always"},
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arrangement", ["none", "around"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_around_the_whole_sharded_model(arrangement: str, reentrant: bool, world_size: int) -> None:
    outer = stepping(lambda model, x, turn, rank: checkpoint(model, x, use_reentrant=reentrant).square().mean())

    assert_parity(seeded(lambda: Checkpointed(arrangement, reentrant)), outer, world_size, settings=BLOCKS)


def test_a_first_unit_under_a_checkpoint_whose_input_needs_no_gradient() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(checkpoint(self.one, x, use_reentrant=False))

    plain = stepping(mean_square, 4, 5, grad=False)

    assert_parity(seeded(Root), plain, settings=BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_before_their_backwards(reentrant: bool) -> None:
    def twice(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = [draw(4, 3, turn=turn + 10 * k, rank=rank, requires_grad=True) for k in range(2)]
        losses = [model(each).square().mean() for each in x]
        for loss in losses:
            loss.backward()
        return [*(loss.detach() for loss in losses), *(each.grad for each in x if each.grad is not None)]

    assert_parity(seeded(lambda: Checkpointed("around", reentrant)), twice, settings=BLOCKS)


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_one_checkpoint_around_blocks_that_are_called_without_the_root(reentrant: bool) -> None:
    """Each of them is a forward of its own, and all are computed again at once."""

    def apart(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        blocks: Any = model.blocks
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=True)
        y = x
        for indices in ((0, 1), (2, 0, 3)):

            def function(z: torch.Tensor, indices: tuple[int, ...] = indices) -> torch.Tensor:
                for index in indices:
                    z = blocks[index](z)
                return z

            y = checkpoint(function, y, use_reentrant=reentrant, preserve_rng_state=False)
        y.square().mean().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(seeded(lambda: Checkpointed("none", reentrant)), apart, world_size=2, optimizer=adam, settings=BLOCKS)


def test_what_a_checkpoint_computes_again_without_gradients_is_released() -> None:
    """Of a block that is called without the root: no gradient tells that a backward came by."""

    def apart(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        blocks: Any = model.blocks
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=True)
        blocks[2](x.detach()).square().mean().backward()

        def function(z: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = blocks[1](blocks[0](z))
            return z + y

        checkpoint(function, x, use_reentrant=True, preserve_rng_state=False).square().mean().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(seeded(lambda: Checkpointed("none", True)), apart, world_size=2, settings=BLOCKS)
