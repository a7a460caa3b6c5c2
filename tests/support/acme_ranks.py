"""Trains with the plugins of examples/acme, picked by name in two files, where that package is installed:

    python -m acme_ranks RUN.TOML ALONE.TOML RESULT

Two ranks train as the first file says, and one as the second; what all ended with is saved to the file RESULT.
"""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import polyshard
import torch
from parity import chain
from polyshard_testing import Rank, run_ranks
from torch import nn

WIDTH, CLASSES, BLOCKS, STEPS, RATE = 16, 4, 3, 3, 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


def made() -> Any:
    """The model that everybody begins with; the seed is the process's own."""
    torch.manual_seed(0)
    return chain(layers=nn.Sequential(*(Block() for _ in range(BLOCKS))), head=nn.Linear(WIDTH, CLASSES))


def batch(step: int, rank: int) -> torch.Tensor:
    """What ``rank`` trains on: shape ``[5, WIDTH]``, fp32."""
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def train(file: str, rank: int) -> dict[str, Any]:
    """What this rank knows after training as ``file`` says."""
    logged = _Lines()
    logging.getLogger("acme").setLevel("INFO")
    logging.getLogger("acme").addHandler(logged)
    model = polyshard.shard(made(), polyshard.ShardConfig.from_toml(file))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        model(batch(step, rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with polyshard.unsharded(model):
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    plugins = sorted(str(plugin) for plugin in polyshard.plugins(model) if plugin.distribution != "polyshard")
    return {
        "parameters": parameters,
        "kept": polyshard.report(model).kept,
        "plugins": plugins,
        "lines": logged.lines,
    }


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _on_rank(file: str, rank: Rank) -> dict[str, Any]:
    return train(file, rank.rank)


def main(together: str, alone: str, result: str) -> None:
    # Looked up by name: other processes import this file as a module.
    from acme_ranks import _on_rank

    ranks = run_ranks(2, partial(_on_rank, together), backend="processes", timeout_s=60.0)
    torch.save({"together": ranks, "alone": train(alone, 0)}, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
