"""``step_in_backward`` where gradients are on their way to the host; its CPU twin is ``test_backward_steps``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import polyshard
import pytest
import torch
from cuda_models import sharded
from parity import whole
from polyshard.optim import step_in_backward
from processes import KeptRanks, gpu_ranks, settle_on_device
from torch import nn

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = functools.partial(RANKS.run, WORLD_SIZE)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def train(rank: int, settings: dict[str, Any], flat: bool, most: float | None) -> tuple[float, list[str]]:
    """How far parameters are from an unsharded model's, as a share of what training changed; where state is.

    ``most``: norm of gradients; None for any.
    """
    device, dtype = settle_on_device(rank), torch.float32 if "precision" in settings else torch.float64
    torch.manual_seed(0)
    # Copies of a unit take far longer than the host needs to get to its next call.
    start = nn.Sequential(*(Block(1024) for _ in range(6))).to(device, dtype)
    model, plain = sharded(copy.deepcopy(start), Block, batch_nbytes=0, **settings), copy.deepcopy(start)
    given = polyshard.flat_parameters(model) if flat else list(model.parameters())
    optimizer, reference = (torch.optim.AdamW(each, lr=1e-3, fused=True) for each in (given, plain.parameters()))
    step_in_backward(model, optimizer, keeps_former=most is not None)
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        batch = torch.randn(64 * WORLD_SIZE, 1024, generator=generator, dtype=dtype).to(device)
        model(batch.chunk(WORLD_SIZE)[rank]).square().mean().backward()
        plain(batch).square().mean().backward()
        if most is not None:
            polyshard.clip_grad_norm_(model, most)
            nn.utils.clip_grad_norm_(plain.parameters(), most)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    got, wanted, before = (
        torch.cat([each.detach().flatten() for each in values])
        for values in (whole(model).values(), plain.parameters(), start.parameters())
    )
    devices = sorted({state["exp_avg"].device.type for state in optimizer.state.values()})
    return float((got - wanted).norm() / (wanted - before).norm()), devices


# The norm falls from step to step.
@pytest.mark.parametrize(("flat", "most"), [(True, None), (False, None), (True, 0.5), (False, 1e-3)])
@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({"offload": "optimizer", "precision": "bf16"}, ["cpu"]),
        ({"offload": "optimizer"}, ["cpu"]),
        ({"offload": {"name": "optimizer", "inner": {"name": "cpu", "pin_memory": False}}}, ["cpu"]),
        ({"offload": {"name": "partial", "units": "[0-2]", "inner": "optimizer"}}, ["cpu", "cuda"]),
        ({"offload": "optimizer", "strategy": "no_shard"}, ["cpu"]),
    ],
    ids=str,
)
def test_training_equals_the_unsharded_model(
    settings: dict[str, Any], devices: list[str], flat: bool, most: float | None
) -> None:
    for off, found in run(train, settings, flat, most):
        # The unsharded model computes in fp32 where this one does in bf16.
        assert off <= (0.1 if "precision" in settings else 1e-10)
        assert found == devices
