"""Two thousand steps on devices: what the allocators hold does not grow. CPU twin: ``tests/faults/test_soak.py``."""

from __future__ import annotations

import warnings

import polyshard
import psutil
import pytest
import torch
from processes import KeptRanks, gpu_ranks, share_device
from torch import nn

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
STEPS, WARM = 2000, 200


def train(rank: int) -> tuple[list[int], list[int]]:
    """Reserved device memory and resident host memory, in bytes, at every ``WARM`` steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(NO_SHARD|registering it failed)")
        polyshard.shard(
            model.to(device),
            polyshard.ShardConfig(policy={"name": "module_class", "classes": [nn.Sequential]}, precision="bf16"),
        )
        optimizer = torch.optim.AdamW(polyshard.flat_parameters(model), fused=True)
        own, reserved, resident = psutil.Process(), [], []
        for step in range(1, STEPS + 1):
            # Of several lengths: blocks of the allocator are split and joined.
            model(torch.randn(64 + 32 * (step % 5), 512, device=device)).float().square().mean().backward()
            polyshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % WARM == 0:
                torch.cuda.synchronize()
                reserved.append(torch.cuda.memory_reserved())
                resident.append(own.memory_info().rss)
    polyshard.close(model)
    return reserved, resident


@pytest.mark.skipif(share_device(), reason="two thousand steps over sockets take too long")
def test_memory_stays_what_it_was() -> None:
    for reserved, resident in RANKS.run(WORLD_SIZE, train, timeout=150.0):
        assert reserved[-1] == reserved[0], reserved
        assert resident[-1] - resident[0] < 16 << 20, resident
