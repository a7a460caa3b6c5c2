"""Ranks of which one uses less of a forward than the others: the same collectives in the same order, the right sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import Block, Net, assert_parity, draw, seeded, units_of
from torch import nn

BLOCKS: dict[str, Any] = {"policy": units_of(Block)}
#: Each collective by itself; one unit ahead; the defaults.
SCHEDULES: list[dict[str, Any]] = [
    {"batch_nbytes": 0, "forward_prefetch": 0, "backward_prefetch": 0},
    {"batch_nbytes": 0},
    {},
]


class Dropping(Net):
    """Runs every block, and goes on without the outputs of some."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(blocks)

    def forward(self, x: torch.Tensor, dropped: Sequence[int] = ()) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            y = block(x)
            x = x if index in dropped else y
        return self.last(x)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("dropped", [(0,), (1,), (2,), (3,), (1, 2), (0, 1, 2, 3)])
def test_one_rank_drops_outputs_of_blocks_that_it_ran(
    dropped: tuple[int, ...], strategy: str, schedule: dict[str, Any]
) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank), dropped if rank == turn % 2 else ()).square().mean()
        loss.backward()
        return [loss.detach()]

    settings = {**BLOCKS, "strategy": strategy, **schedule}
    assert_parity(seeded(Dropping), step, world_size=2, settings=settings)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_and_two_backwards_of_which_one_drops_a_block_on_one_rank(
    order: tuple[int, int], strategy: str, schedule: dict[str, Any]
) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = [
            model(draw(4, 3, turn=2 * turn + part, rank=rank), (1, 2) if part == rank else ()).square().mean()
            for part in range(2)
        ]
        for part in order:
            losses[part].backward()
        return [loss.detach() for loss in losses]

    assert_parity(seeded(Dropping), step, world_size=2, settings={**BLOCKS, "strategy": strategy, **schedule})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_blocks_called_without_the_root_of_which_one_rank_drops_one(schedule: dict[str, Any]) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        blocks = model.get_submodule("blocks")
        assert isinstance(blocks, nn.ModuleList)
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=True)
        y = x
        for index, block in enumerate(blocks):
            dropped = rank == 1 and index == turn
            y = y if dropped and block(y) is not None else block(y)
        y.square().mean().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(seeded(Dropping), step, world_size=2, settings={**BLOCKS, **schedule})
