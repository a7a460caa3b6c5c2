"""A checkpoint that three ranks wrote, and a model of one rank that loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import torch
from parity import local
from polyshard import checkpoint
from polyshard_testing import Rank, run_ranks
from program import Block, build
from torch import nn

RANKS = 3


def write(root: Path, *steps: int, extra: dict[str, Any] | None = None) -> list[Path]:
    """Checkpoints of ``steps``, of a model whose every parameter is the step's number, and of Adam's state."""

    def on_rank(rank: Rank) -> list[Path]:
        with rank.lock:
            model = build()
        policy = {"name": "module_class", "classes": [Block]}
        polyshard.shard(model, polyshard.ShardConfig(collectives=rank.collectives, policy=policy))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        made = []
        for step in steps:
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float(step))
            made.append(checkpoint.save(root, step, model, optimizer, extra=extra or {"step": step}))
        return made

    return run_ranks(RANKS, on_rank)[0]


class Alone:
    """A model of one rank, with its optimizer."""

    def __init__(self) -> None:
        self.model: nn.Module = build(seed=7)
        policy = {"name": "module_class", "classes": [Block]}
        settings = polyshard.ShardConfig(collectives={"name": "fake"}, strategy="no_shard", policy=policy)
        polyshard.shard(self.model, settings)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def load(self, directory: Path) -> Any:
        """Take a checkpoint up; returns what ``extra`` was."""
        return checkpoint.load(directory, self.model, self.optimizer)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters."""
        return {name: local(parameter.detach()).clone() for name, parameter in self.model.named_parameters()}

    def steps(self) -> set[float]:
        """Which values the parameters have: one, where they are of one step."""
        return {float(each) for value in self.values().values() for each in value.unique()}
