"""A model with every kind of tensor that a file meets, on threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import polyshard
import torch
from parity import Block, local, seed_all
from polyshard import ShardConfig
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Every kind of tensor that a file meets: odd sizes, a tie, another memory order, buffers, what is not sharded."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block(6, 13) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.ignored = nn.Linear(6, 2)
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        head: torch.Tensor = self.head(self.norm(x))
        return head


def net(seed: int = 0, **options: Any) -> Net:
    seed_all(seed)
    return Net(**options)


def state(seed: int = 5) -> Values:
    """What a file of ``Net`` holds: the tied tensor once."""
    values = net(seed).state_dict()
    del values["head.weight"]
    values["norm.running_mean"].normal_()
    return {name: value.contiguous() for name, value in values.items()}


def sharded(model: Net, world: ThreadedWorld, rank: int, **settings: Any) -> Net:
    options: dict[str, Any] = {"policy": {"name": "transformer", "layers": Block}, **settings}
    config = ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, device="cpu", **options)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # one rank shards nothing
        return polyshard.shard(model, config, ignored_modules=[model.ignored])


def on_ranks(number: int, body: Callable[[Net, int], Any], **settings: Any) -> list[Any]:
    """What ``body(model, rank)`` returns on each rank, of models that begin with other values than the file's."""

    def run(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:  # threads share one random state
            model = net()
        return body(sharded(model, world, rank, **settings), rank)

    return ThreadedWorld(number).run(run)


def whole(model: nn.Module) -> Values:
    with polyshard.unsharded(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(values: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(local(values[name]), local(value)) for name, value in expected.items())
