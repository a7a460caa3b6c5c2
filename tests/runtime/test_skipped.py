"""Modules that some ranks leave out of a forward train as in a reference that averages what ranks have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, assert_parity, draw, is_sharded, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import ConfigError, RankMismatchError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Module):
    """Parameters of its own around two units."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 5)
        self.blocks = nn.ModuleList([Block(5, 6), Block(5, 6)])
        self.norm = nn.LayerNorm(5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class VisionLanguage(nn.Module):
    """Text, and an image with it on some ranks. The tower stands behind the text: that is not the order of calls."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Block(5, 7) for _ in range(3))
        self.vision = Tower()
        self.head = nn.Linear(5, 2)
        self.recomputes = recomputes

    def forward(self, text: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        x = self.blocks[0](self.embed(text))
        if images is not None:
            x = x + (checkpoint(self.vision, images, use_reentrant=False) if self.recomputes else self.vision(images))
        else:
            polyshard.skip(self.vision)
        for block in self.blocks[1:]:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


#: By turn: the ranks that have images.
TURNS = [{1}, {0}, set(), {2}, {0, 2}, {0, 1, 2}, {1}]


def forward_of(model: nn.Module, turn: int, rank: int, having: set[int]) -> torch.Tensor:
    if is_sharded(model):
        polyshard.agree_on_use(model, {model.vision: rank in having})
    images = draw(2, 4, rank=rank + 10 * turn) if rank in having else None
    return model(draw(2, 3, rank=rank + 10 * turn), images)


def step_of(turns: list[set[int]]) -> Callable[[nn.Module, int, int], list[torch.Tensor]]:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = forward_of(model, turn, rank, turns[turn]).square().mean()
        loss.backward()
        vision = [parameter.grad for parameter in model.vision.parameters()]
        assert turns[turn] or vision == [None] * len(vision)
        return [loss.detach()]

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


UNITS = [units_of(Block), units_of(Block, Tower)]


@pytest.mark.parametrize("policy", UNITS, ids=["blocks", "tower"])
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "full_shard"},
        {"strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
        {"strategy": "full_shard", "batch_nbytes": "128 MiB", "backward_prefetch": 2, "forward_prefetch": 2},
        {"strategy": "full_shard", "check_ranks": False},
    ],
    ids=str,
)
def test_images_on_some_ranks(policy: dict[str, Any], settings: dict[str, Any]) -> None:
    model = seeded(VisionLanguage)
    assert_parity(model, step_of(TURNS), 3, len(TURNS), adamw, {"policy": policy, **settings})
