"""``step_in_backward`` where gradients are on their way to the host; its CPU twin is ``test_backward_steps``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import polyshard
import pytest
import torch
from cuda_models import sharded
from parity import local
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


def train(
    rank: int, settings: dict[str, Any], flat: bool, most: float | None
) -> tuple[list[float], list[float], float, list[str]]:
    """Losses with and without steps in the backward; the largest difference of parameters; where state is.

    ``most``: norm of gradients; None for any.
    """
    device = settle_on_device(rank)
    torch.manual_seed(0)
    # Copies of a unit take far longer than the host needs to get to its next call.
    start = nn.Sequential(*(Block(1024) for _ in range(6))).to(device)
    losses: list[list[float]] = []
    models = []
    for hands_over in (True, False):
        model = sharded(copy.deepcopy(start), Block, batch_nbytes=0, **settings)
        given = polyshard.flat_parameters(model) if flat else list(model.parameters())
        optimizer = torch.optim.AdamW(given, lr=1e-3, fused=True)
        if hands_over:
            step_in_backward(model, optimizer, keeps_former=most is not None)
        generator = torch.Generator().manual_seed(3 + rank)
        seen = []
        for _ in range(6):
            loss = model(torch.randn(64, 1024, generator=generator).to(device)).square().mean()
            loss.backward()
            if most is not None:
                polyshard.clip_grad_norm_(model, most)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
        losses.append(torch.stack(seen).tolist())
        models.append(model)
    devices = sorted({state["exp_avg"].device.type for state in optimizer.state.values()})
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return (
        *losses,
        max(float((local(a) - local(b)).detach().abs().max()) for a, b in pairs if local(a).numel()),
        devices,
    )


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
def test_training_is_that_of_steps_behind_the_backward(
    settings: dict[str, Any], devices: list[str], flat: bool, most: float | None
) -> None:
    for handed, plain, difference, found in run(train, settings, flat, most):
        assert handed == plain
        assert difference == 0
        assert found == devices
