"""A small transformer over bytes, its batches, and what it writes. Nothing here knows of shards."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

HEADS = 4


class Block(nn.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.LayerNorm(width), nn.LayerNorm(width)))
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result: ``[batch, length, width]``."""
        query, key, value = self.project(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        fed: torch.Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + fed


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, 256]`` of the byte after each of ``inputs``, int64 ``[batch, length]``."""
        logits: torch.Tensor = self.head(self.blocks(self.bytes(inputs) + self.positions[: inputs.shape[1]]))
        return logits


def batch_of(text: bytes, step: int, rows: int, context: int) -> torch.Tensor:
    """What all trainers together learn in ``step``: int64 ``[rows, context + 1]``."""
    starts = torch.randint(len(text) - context, (rows,), generator=torch.Generator().manual_seed(step))
    return torch.stack([torch.tensor(list(text[start : start + context + 1])) for start in starts.tolist()])


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Nats a byte."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def written(model: Model, prompt: bytes, count: int) -> str:
    """``prompt`` and the ``count`` likeliest bytes behind it."""
    text = list(prompt)
    for _ in range(count):
        inputs = torch.tensor([text[-model.context :]], device=model.head.weight.device)
        text.append(int(model(inputs)[0, -1].argmax()))
    return bytes(text).decode(errors="replace")
