"""``auto`` on one host's GPUs: it copies where NVLink connects them, and says so; its CPU twin is ``test_auto.py``."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import warnings
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from processes import KeptRanks, device_of, gpu_ranks
from torch import nn

WORLD_SIZE = gpu_ranks(4)
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD_SIZE < 2, reason="one rank gathers nothing")]

#: What every rank says where they copy.
COPIED = (
    f"symmetric: {WORLD_SIZE} ranks on one host, NVLink between all; units from 64 MiB by copy engines, the rest by "
    "NCCL"
)
DEVICES_EACH = torch.cuda.device_count() >= WORLD_SIZE


class Net(nn.Module):
    """Two units of 64 MiB in fp32, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 4096, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(4096, 4096, bias=False) for _ in range(2))
        self.head = nn.Linear(4096, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def train(rank: int, settings: dict[str, Any]) -> tuple[list[str], float]:
    """What ``auto`` says after each step, and how far losses are from the unsharded model's at most."""
    device = device_of(rank)
    # Not every NCCL can register memory of ranks that share a device.
    warnings.filterwarnings("ignore", message=".*registering it failed")
    torch.manual_seed(0)
    reference = Net().to(device)
    config = polyshard.ShardConfig(policy={"name": "module_class", "classes": [nn.Linear]}, **settings)
    model = polyshard.shard(copy.deepcopy(reference), config)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, reference)]
    said, worst = [], 0.0
    for step in range(4):
        x = torch.randn(8 * WORLD_SIZE, 64, generator=torch.Generator(device).manual_seed(step), device=device)
        own = model(x.chunk(WORLD_SIZE)[rank]).square().mean()
        whole = reference(x).square().mean()
        own.backward()
        whole.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = own.detach() / WORLD_SIZE
        torch.distributed.all_reduce(total)
        worst = max(worst, abs(total.item() - whole.item()) / whole.item())
        said.append(polyshard.report(model).reasons["collectives"])
    polyshard.close(model)
    return said, worst


def test_units_of_64_mib_are_copied_where_nvlink_connects_all_and_no_rank_is_warned() -> None:
    # Warnings are errors on these ranks.
    answers = run(train, {})
    for said, worst in answers:
        assert worst < 1e-4
        assert said == answers[0][0]
        assert len(set(said)) == 1
    (said,) = set(answers[0][0])
    print(said)
    if not DEVICES_EACH:
        assert said.startswith("nccl: ")
    elif os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1" and linked():
        assert said == COPIED
    else:
        assert said.startswith("nccl: ")


def linked() -> bool:
    """Whether NVLink connects every two of the first devices, as the driver's tool shows it."""
    shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=True).stdout
    # Without the codes of a terminal that underline the header.
    rows = [re.sub(r"\x1b\[\d+m", "", line).split() for line in shown.splitlines()]
    cells = [row[1 : 1 + WORLD_SIZE] for row in rows if row and row[0] in {f"GPU{at}" for at in range(WORLD_SIZE)}]
    # The header begins with a device's name, too, and not with a row of links.
    links = [[cell for cell in row if cell != "X"] for row in cells if "X" in row]
    return len(links) == WORLD_SIZE and all(cell.startswith("NV") for row in links for cell in row)


@pytest.mark.skipif(WORLD_SIZE != 4, reason="two groups of two ranks")
def test_groups_of_another_size_leave_copies_to_the_first() -> None:
    # The test before has met over all ranks, or this one does.
    before = {said for (said, *_), _ in run(train, {})}
    answers = run(train, {"strategy": "hybrid_shard", "shard_size": 2})
    for said, worst in answers:
        assert worst < 1e-4
        assert said[0].startswith("nccl: ")
        if before == {COPIED}:
            assert said[0] == "nccl: ranks share symmetric memory in another group already, [0, 1, 2, 3]"
