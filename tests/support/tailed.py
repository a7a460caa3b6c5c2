"""A model with an embedding in front of its blocks and a head behind, and what a forward may do with that head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parity import Block, root_of, sharded_copy, units_of
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS = 8, 32


class Product(torch.autograd.Function):
    """``x @ weight.t()``, as fused losses have it: a function that is given the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def _by_name(head: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return Product.apply(x, dict(head.named_parameters())["weight"])


#: What a forward may do with the head beside calling it.
USES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "called": lambda head, x: head(x),
    "its weight": lambda head, x: functional.linear(x, head.weight),
    "its weight in a function": lambda head, x: Product.apply(x, head.weight),
    "its weight by name": lambda head, x: functional.linear(x, next(head.parameters())),
    "its weight by name in a function": _by_name,
    "both ways": lambda head, x: head(x) + functional.linear(x, head.weight),
    "both ways, called last": lambda head, x: functional.linear(x, head.weight) + head(x),
    "its weight by name, called last": lambda head, x: _by_name(head, x) + head(x),
    "its rows": lambda head, x: head(x) + torch.stack([head.weight[0], head.weight[1]]).sum(),
    "its values": lambda head, x: head(x) * head.weight.detach().square().mean(),
    "its values by name": lambda head, x: head(x) * sum(p.detach().square().mean() for p in head.parameters()),
    "in a checkpoint": lambda head, x: checkpoint(lambda y: functional.linear(y, head.weight), x, use_reentrant=False),
    "in an old checkpoint": lambda head, x: checkpoint(lambda y: y @ head.weight.t(), x, use_reentrant=True),
}


class Model(nn.Module):
    """An embedding and a head around blocks."""

    use = "called"

    def __init__(self, use: str = "called", scaled: bool = False) -> None:
        super().__init__()
        self.use = use
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else None
        self.blocks = nn.ModuleList([Block(WIDTH, 6), Block(WIDTH, 6)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.scale is not None:
            x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return USES[self.use](self.head, self.norm(x))


def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * turn + rank)
    loss = model(torch.randint(WORDS, (2, 3), generator=generator)).square().mean()
    loss.backward()
    return [loss.detach()]


def names_of(model: nn.Module) -> list[str]:
    return [unit.name for unit in root_of(model).units]


def sharded(world: ThreadedWorld, rank: int, model: nn.Module, **settings: Any) -> nn.Module:
    return sharded_copy(model, rank, world, policy=units_of(Block), **settings)
