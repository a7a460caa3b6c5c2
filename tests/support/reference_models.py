"""Larger reference models: every kind of parameter in one, and an embedding and a head around blocks in the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parity import Block, draw, root_of, seeded, sharded_copy, units_of
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
    return Product.apply(x, head.get_parameter("weight"))


#: What a forward may do with the head beside calling it.
USES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "called": lambda head, x: head(x),
    "its weight": lambda head, x: functional.linear(x, head.weight),
    "its weight in a function": lambda head, x: Product.apply(x, head.weight),
    "its weight by name": lambda head, x: functional.linear(x, head.get_parameter("weight")),
    "its weight by name in a function": _by_name,
    "both ways": lambda head, x: head(x) + functional.linear(x, head.weight),
    "both ways, called last": lambda head, x: functional.linear(x, head.weight) + head(x),
    "its weight by name, called last": lambda head, x: _by_name(head, x) + head(x),
    "its rows": lambda head, x: head(x) + torch.stack([head.weight[0], head.weight[1]]).sum(),
    "its values": lambda head, x: head(x) * head.weight.detach().square().mean(),
    "its values by name": lambda head, x: head(x) * head.get_parameter("weight").detach().square().mean(),
    "in a checkpoint": lambda head, x: checkpoint(lambda y: functional.linear(y, head.weight), x, use_reentrant=False),
    "in an old checkpoint": lambda head, x: checkpoint(lambda y: y @ head.weight.t(), x, use_reentrant=True),
}


class Tailed(nn.Module):
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


def tailed_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * turn + rank)
    loss = model(torch.randint(WORDS, (2, 3), generator=generator)).square().mean()
    loss.backward()
    return [loss.detach()]


def units_in(model: nn.Module) -> list[str]:
    return [unit.name for unit in root_of(model).units]


def sharded_tailed(world: ThreadedWorld, rank: int, model: nn.Module, **settings: Any) -> nn.Module:
    return sharded_copy(model, rank, world, policy=units_of(Block), **settings)
