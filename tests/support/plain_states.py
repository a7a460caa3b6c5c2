"""A plain model that was trained without any sharding, and its state as torch's own functions tell it."""

from __future__ import annotations

from typing import Any

import polyshard
import torch
from parity import seeded, threaded, units_of
from polyshard.state import StateOptions, get_state_dict
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

State = dict[str, Any]


class Part(nn.Module):
    """What becomes a unit of its own: parameters of three and of two dimensions, a bias of three elements."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(3, 5, 7))
        self.line = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("bi,oki->bk", x, self.gate).sum(1, keepdim=True) + self.line(x).sum(1, keepdim=True)


class Odd(nn.Module):
    """Shapes that no number of ranks divides, a filter in channels_last, a tied weight, a frozen one, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, (1, 1)).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(11, 7)
        self.parts = nn.Sequential(Part(), Part())
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.conv(x[:, :3, None, None]).flatten(1)
        return self.head(self.parts(self.norm(x))) * self.scale + self.frozen.sum()


def odd(seed: int = 0) -> Odd:
    """In float32, the same at each call with one seed."""
    made = seeded(Odd, seed).float()
    assert isinstance(made, Odd)
    return made


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    """Two groups of different settings."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    matrices = [each for name, each in named if "weight" in name or "gate" in name]
    others = [each for name, each in named if "weight" not in name and "gate" not in name]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": lr / 2}], lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    """Steps with the same batch on every rank."""
    for turn in range(first, first + steps):
        tokens = torch.randint(11, (6,), generator=torch.Generator().manual_seed(turn))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_state(steps: int = 2, seed: int = 0) -> State:
    """``{"model": ..., "optimizer": ...}`` of a plain model after so many steps."""
    model = odd(seed)
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def made(rank: int, world: ThreadedWorld, seed: int = 0, **settings: Any) -> tuple[Odd, torch.optim.AdamW]:
    """A sharded model on one thread, and its optimizer."""
    with world.lock:
        model = odd(seed)
    polyshard.shard(model, threaded(world, rank, policy=units_of(Part), check_ranks=False, **settings))
    return model, adamw(model)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The same of a sharded model, whole on every rank."""
    one, other = get_state_dict(model, optimizer, StateOptions(form="full"))
    return {"model": one, "optimizer": other}


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two nested values differ, in a bit or in what there is; names of a group's parameters in any order."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{path}/{key}" for key in one.keys() ^ other.keys()]
        return found + [
            each for key in one.keys() & other.keys() for each in differing(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [path]
        if path.endswith("/params"):
            one, other = sorted(one), sorted(other)
        return [
            each for i, (a, b) in enumerate(zip(one, other, strict=True)) for each in differing(a, b, f"{path}/{i}")
        ]
    return [] if one == other else [path]
