"""Models and steps for the tests of ``polyshard_fsdp2``, and torch's FSDP2 beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import polyshard_fsdp2
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

#: Both have the same names.
FACES: tuple[ModuleType, ModuleType] = (torch.distributed.fsdp, polyshard_fsdp2)
OURS = polyshard_fsdp2
WIDTH, WORDS = 12, 17


class Block(nn.Module):
    """Rows that no small number of ranks divides, biases and norms."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width + 1)
        self.down = nn.Linear(4 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


class Words(nn.Module):
    """A small language model."""

    def __init__(self, tied: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) * self.scale
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def init_weights(self) -> None:
        """As torchtitan's models do: by hand, over attributes, by shapes, and some of it twice."""
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.scale.fill_(1.0)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm.reset_parameters()
            for linear in (block.up, block.down):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        self.norm.reset_parameters()
        nn.init.orthogonal_(self.head.weight)
        with torch.no_grad():
            for block in self.blocks:
                assert isinstance(block, Block)
                block.down.weight.mul_(0.5)


def make(tied: bool = False, dtype: torch.dtype = torch.float64) -> Words:
    """The same on every rank."""
    torch.manual_seed(0)
    return Words(tied).to(dtype)


def cpu_mesh(*shape: int) -> DeviceMesh:
    """Over all ranks; of two dimensions, (replicate, shard)."""
    if len(shape) == 2:
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),))


def shard_all(face: ModuleType, model: Words, mesh: DeviceMesh | None = None, **settings: Any) -> Words:
    """Blocks, embedding and the rest."""
    mesh = mesh or cpu_mesh()
    for block in model.blocks:
        face.fully_shard(block, mesh=mesh, **settings)
    face.fully_shard(model.embedding, mesh=mesh, **settings)
    face.fully_shard(model, mesh=mesh, **settings)
    return model


def batches(steps: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Another one on each rank."""
    random = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    for _ in range(steps):
        yield torch.randint(0, WORDS, (2, 5), generator=random)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1).double(), words.flatten())


def train(
    model: nn.Module,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> list[float]:
    """Losses, and the norms of gradients."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = []
    for words in batches(steps):
        loss = step(model, words)
        if loss.requires_grad:
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), as_whole(norm).item()]
    return told


def as_whole(tensor: Any) -> torch.Tensor:
    """The whole of a ``DTensor``; anything else as it is."""
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers."""
    return {name: as_whole(value).clone() for name, value in model.state_dict().items()}


def same(ours: Any, theirs: Any, **tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, **tolerance)


def both(run: Callable[[ModuleType], tuple[Sequence[float], dict[str, torch.Tensor]]], **tolerance: float) -> None:
    """What ``run`` told of losses and parameters is the same of both faces."""
    theirs, ours = (run(face) for face in FACES)
    same(ours[0], theirs[0], **tolerance)
    assert list(ours[1]) == list(theirs[1])
    same(ours[1], theirs[1], **tolerance)
