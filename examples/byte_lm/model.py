"""A decoder-only transformer over bytes, in plain PyTorch: nothing in it knows that it will be sharded."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from settings import RunSettings
from torch import nn

#: Values of a byte.
VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and the result: ``[batch, length, width]``."""
        batch, length, width = x.shape
        projected = self.attention_in(self.attention_norm(x))
        query, key, value = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: torch.Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class ByteTransformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self._initialise(layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits ``[batch, length, 256]`` of the byte after each of ``inputs``, int64 ``[batch, length]``."""
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                # Each block adds two terms to the residual stream: together they shall not outgrow it.
                into_residual = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if into_residual else 0.02)


def build_model(run: RunSettings) -> ByteTransformer:
    """The model that ``run`` asks for, on the CPU; the same values whenever and wherever ``run`` is the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        model = ByteTransformer(run.width, run.layers, run.heads, run.context)
    return model.to(run.master_dtype)


def part_of_mean_loss(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, *, sequences: int, world_size: int
) -> torch.Tensor:
    """A rank's loss, in nats a byte, such that its mean over ranks is the mean over all ``sequences``.

    That holds, for the loss and so for the gradients, even where ranks have different numbers of them. At least fp32.
    """
    logits = model(inputs)
    if logits.dtype.itemsize < torch.float32.itemsize:
        logits = logits.float()
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total * (world_size / (sequences * inputs.shape[1]))


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, *, context: int, temperature: float, seed: int, device: torch.device
) -> bytes:
    """``prompt`` continued by ``count`` bytes; the likeliest ones where ``temperature`` is 0.

    Every rank must call it, with the same arguments: each forward gathers the sharded parameters.
    """
    training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        inputs = torch.tensor([text[-context:]], device=device)
        logits = model(inputs)[0, -1].float().cpu()
        if temperature > 0:
            following = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
        else:
            following = logits.argmax(0)
        text.append(int(following))
    model.train(training)
    return bytes(text)
