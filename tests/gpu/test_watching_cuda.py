"""Replicas and outputs that go wrong on a device.

CPU twins: ``tests/diagnose/test_replicas.py``, ``tests/plugins/test_finite.py``.
"""

from __future__ import annotations

import polyshard
import pytest
import torch
from parity import local
from polyshard.errors import RankMismatchError
from processes import KeptRanks, gpu_ranks
from torch import nn

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
POLICY = {"name": "module_class", "classes": [nn.Linear]}


def net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 8)).to(device)


def compare(rank: int, dtype: torch.dtype) -> tuple[str, int]:
    """What is found of a flipped bit, and how often nothing was found of none."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = polyshard.shard(net(device).to(dtype), polyshard.ShardConfig(strategy="no_shard", policy=POLICY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sound = 0
    for _ in range(3):
        model(torch.randn(16, 64, device=device, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        polyshard.check_replicas(model)
        sound += 1
    if rank == 1:
        held = local(model[2].weight.detach()).view(-1)
        held.view({4: torch.int32, 2: torch.int16}[dtype.itemsize])[123] ^= 1 << 5
    try:
        polyshard.check_replicas(model)
    except RankMismatchError as error:
        return str(error), sound
    finally:
        polyshard.close(model)
    return "", sound


@pytest.mark.skipif(gpu_ranks() < 2, reason="needs a second rank that holds the same")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_bit_of_a_replica_is_named(dtype: torch.dtype) -> None:
    for text, sound in RANKS.run(WORLD_SIZE, compare, dtype, timeout=60.0):
        assert sound == 3
        assert "Parameter '2.weight' of unit '2' differs between ranks that hold the same of it" in text
        # Of two ranks, nobody knows which is right.
        which = "[0], [1] agree among themselves" if WORLD_SIZE == 2 else "on ranks [1] it is not what it is on"
        assert which in text
