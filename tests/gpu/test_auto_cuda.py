"""``auto`` on one host's GPUs: it copies where NVLink connects them, and says so; its CPU twin is ``test_auto.py``."""

from __future__ import annotations

import copy
import os
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
    elif os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1" and run(linked) == [True] * WORLD_SIZE:
        assert said == COPIED
    else:
        assert said.startswith("nccl: ")


def linked(rank: int) -> bool:
    """Whether NVLink connects this rank's device with every other one, as NVML counts its links."""
    try:
        import pynvml
    except ImportError:
        pytest.skip("no pynvml to ask")
    pynvml.nvmlInit()
    for other in range(WORLD_SIZE):
        if other == rank:
            continue
        pair = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in (rank, other)]
        status = pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status != pynvml.NVML_P2P_STATUS_OK:
            return False
    return True


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
