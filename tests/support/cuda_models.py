"""The model of GPU tests: an embedding, blocks and a head, and its sharding over one device or more."""

from __future__ import annotations

import warnings
from typing import Any

import polyshard
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, recomputes: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)
        self.dropout = nn.Dropout(dropout)
        self.recomputes = recomputes

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)
        return self.body(x)


class Net(nn.Module):
    """Answers its loss."""

    def __init__(
        self, recurrent: bool = False, recomputes: bool = False, dropout: float = 0.0, width: int = 24
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width, recomputes, dropout) for _ in range(4))
        self.recurrent = nn.LSTM(width, width, batch_first=True) if recurrent else None
        self.head = nn.Linear(width, 31)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if self.recurrent is not None:
            x = self.recurrent(x)[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def sharded(model: nn.Module, *units: type[nn.Module], **settings: Any) -> nn.Module:
    """Units are modules of these classes, or blocks and recurrent layers."""
    with warnings.catch_warnings():
        # One GPU is a world of one.
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        policy = {"name": "module_class", "classes": list(units or (Block, nn.LSTM))}
        return polyshard.shard(model, polyshard.ShardConfig(policy=policy, **settings))
