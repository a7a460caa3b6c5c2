"""A model with every kind of parameter that a layout meets, and a layout that gives several buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import polyshard
import torch
from parity import Block, draw, seeded, threaded, units_of
from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry
from polyshard_backends.threaded import ThreadedWorld
from polyshard_layouts.layouts import Rows
from torch import nn

#: Every layout that polyshard comes with, with blocks that cut small parameters too.
LAYOUTS = {
    "flat": "flat",
    "rows": "rows",
    "blocks": {"name": "blocks", "size": 16, "smallest": 0},
    "tiles": {"name": "blocks", "size": [2, 2], "smallest": 0},
}


class Halves(Layout):
    """Every second parameter in a buffer of its own, from last to first, by rows."""

    api_version = 1

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        every = range(len(unit.parameters))
        found: list[Arrangement] = []
        for members in (every[::-2], every[-2::-2]):
            if members:
                chosen = dataclasses.replace(unit, parameters=tuple(unit.parameters[index] for index in members))
                for each in Rows(PluginContext("rows", torch.device("cpu"))).arrange(chosen):
                    found.append(
                        dataclasses.replace(
                            each,
                            order=tuple(members[index] for index in each.order),
                            by_rows=frozenset(members[index] for index in each.by_rows),
                        )
                    )
        return found


class Frozen(nn.Linear):
    """A unit whose parameters are not trained."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.requires_grad_(False)


class Mixed(nn.Module):
    """A matrix without a bias, a norm, a convolution in channels_last, a transposed matrix, an empty parameter, one in
    float32, a tied embedding, and units around blocks and around what is frozen. Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.embed = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(2, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(8, 12).t() / 4)
        self.empty = nn.Parameter(torch.empty(3, 0))
        self.blocks = nn.ModuleList([Block(8, 20), Block(8, 12)])
        self.frozen = Frozen()
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        h = h + self.embed((x.detach()[:, 0] * 10).long() % 11)
        image = x.reshape(-1, 2, 3, 1).expand(-1, -1, -1, 3)
        h = h + self.conv(image).flatten(1)
        h = torch.tanh(h @ self.turned.t()) @ self.turned + self.empty.sum()
        for block in self.blocks:
            h = block(h)
        # Gradients in float32 that means over 2, 3 and 4 ranks leave exact, so that these are the same to the bit.
        whole = 12 / 1024 * (x.detach()[:3, :5].sum() * 4).round().float() * torch.arange(35.0).view(7, 5)
        return self.head(h + self.frozen(h)).square().mean() + (self.narrow * whole).sum().double()


def mixed() -> nn.Module:
    """The model in float64, and one parameter in float32; the same at every call."""
    model = seeded(Mixed)
    model.narrow = nn.Parameter(model.narrow.detach().float())
    return model


def mixed_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    """Forward and backward for an input of shape [4, 6] that requires a gradient."""
    x = draw(4, 6, turn=turn, rank=rank, requires_grad=True)
    loss = model(x)
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad]


#: Every layout, and one that divides each unit.
EVERY_LAYOUT = {**LAYOUTS, "halves": Halves()}


def cut(rank: int, world: ThreadedWorld, **settings: Any) -> nn.Module:
    """The model, sharded on one thread of ``world``: blocks and the frozen module are units."""
    with world.lock:
        mine = mixed()
    return polyshard.shard(mine, threaded(world, rank, **{"policy": units_of(Block, Frozen), **settings}))


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters by name."""
    with polyshard.unsharded(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
