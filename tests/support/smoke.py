"""Whether an installed polyshard works: imported from where it was installed, it trains, and its command lists plugins.

Run by ``built_package.py`` with an interpreter that has polyshard and what it declares, and nothing else.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import polyshard
import polyshard.checkpoint
import polyshard_fsdp
import torch
from torch import nn

RANKS = 8


def train(model: nn.Module) -> float:
    """One step of SGD; returns the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.functional.mse_loss(model(torch.linspace(-1, 1, 64).view(4, 16)), torch.ones(4, 4))
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    """Raises ``AssertionError`` where something is not as a user expects it."""
    environment = Path(sys.prefix)
    for package in (polyshard, polyshard_fsdp):
        assert Path(str(package.__file__)).is_relative_to(environment), package.__file__
    version = polyshard.__version__
    assert importlib.metadata.version("polyshard") == version

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    collectives = {"name": "fake", "world_size": RANKS}
    policy = {"name": "module_class", "classes": "torch.nn:Linear"}

    # Equal ranks have equal gradients, whose mean is each one's own.
    whole = copy.deepcopy(plain)
    polyshard.shard(whole, polyshard.ShardConfig(collectives=collectives, policy=policy, strategy="no_shard"))
    assert train(whole) == train(plain)
    for found, expected in zip(whole.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)

    sharded = polyshard.shard(copy.deepcopy(plain), polyshard.ShardConfig(collectives=collectives, policy=policy))
    first = next(sharded.parameters())
    before = first.to_local().detach().clone()
    # An eighth of the 32 rows of the first layer's weight.
    assert before.shape == (4, 16), before.shape
    train(sharded)
    assert not torch.equal(first.to_local(), before)

    command = Path(sys.executable).with_name("polyshard")
    listed = subprocess.run([command, "plugins", "list", "--json"], capture_output=True, text=True, check=True).stdout
    states = {(plugin["group"], plugin["name"]): plugin["state"] for plugin in json.loads(listed)}
    offered = importlib.metadata.distribution("polyshard").entry_points
    expected_names = {(entry.group, entry.name) for entry in offered if entry.group.startswith("polyshard.")}
    assert len(expected_names) > 20
    assert states == dict.fromkeys(expected_names, "ready"), states


if __name__ == "__main__":
    main()
