"""Forwards and backwards in ways that ``test_random_programs.py`` does not draw, against unsharded models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_observed,
    assert_parity,
    draw,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    train_reference,
    units_of,
)
from polyshard.errors import StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS = {"policy": units_of(Block)}


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


# Ranks of which one uses less of a forward than the others.


@pytest.mark.parametrize("schedule", [{"batch_nbytes": 0, "forward_prefetch": 0, "backward_prefetch": 0}, {}])
def test_blocks_called_without_the_root_of_which_one_rank_drops_one(schedule: dict[str, Any]) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        blocks: Any = model.blocks
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=True)
        y = x
        for index, block in enumerate(blocks):
            dropped = rank == 1 and index == turn
            y = y if dropped and block(y) is not None else block(y)
        y.square().mean().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(seeded(lambda: Net(4)), step, world_size=2, settings={**BLOCKS, **schedule})


@pytest.mark.parametrize("reentrant", [False, True])
def test_all_that_is_trained_is_under_checkpoints_and_one_rank_drops_some_of_it(reentrant: bool) -> None:
    """No parameter is in the graph that the backward is asked for, so it cannot tell that gradients add up."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(3) for _ in range(3))

        def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                y = checkpoint(block, x, use_reentrant=reentrant)
                x = x if index in dropped else y
            return x

    step = stepping(lambda model, x, turn, rank: model(x, (turn,) if rank else ()).square().mean())
    assert_parity(seeded(Bare), step, world_size=2, optimizer=adam, settings=BLOCKS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_reentrant_checkpoint_whose_input_needs_a_gradient_on_one_rank_alone() -> None:
    """As of frozen embeddings, where the samples of one rank alone have an image, whose projection is trained."""

    class Projected(Net):
        def forward(self, x: torch.Tensor, projects: bool) -> torch.Tensor:
            y = self.first(x)
            y = y if projects else y.detach()
            for block in self.blocks:
                y = checkpoint(block, y, use_reentrant=True)
            return self.last(y)

    step = stepping(lambda model, x, turn, rank: model(x, rank != turn % 2).square().mean(), grad=False)
    assert_parity(seeded(Projected), step, world_size=2, turns=2, optimizer=adam, settings=BLOCKS)
