"""``reshard_after_forward="auto"`` by what CUDA's allocator measures; its CPU twin is ``test_memory_budget``."""

from __future__ import annotations

import gc
from typing import Any

import polyshard
import pytest
import torch
from polyshard.interfaces import PluginContext
from polyshard.runtime.root import Root
from polyshard_backends.fake import FakeCollectives
from torch import nn

pytestmark = pytest.mark.gpu

BLOCKS = 6
WIDTH = 1024


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


POLICY = {"name": "module_class", "classes": [Block]}
#: Gathers of a block, one a parameter.
GATHERS = 4
#: Bytes of one block's gather buffer in fp32, but for rounding.
UNIT = 4 * sum(parameter.numel() for parameter in Block(WIDTH).parameters())


@pytest.fixture(autouse=True)
def fresh_statistics() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def root_of(model: nn.Module) -> Root:
    root: Root = model.__dict__["_polyshard_module_state"].root
    return root


def one_of_four(**settings: Any) -> tuple[nn.Module, FakeCollectives]:
    """One rank of a pretended world: what a rank needs can be measured on a single device."""
    device = torch.device("cuda", 0)
    collectives = FakeCollectives(PluginContext("fake", device), 0, 4)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    config = polyshard.ShardConfig(collectives=collectives, policy=POLICY, device=device, **settings)
    return polyshard.shard(model, config), collectives


def train(steps: int, **settings: Any) -> tuple[list[float], int, int]:
    """Gathers of blocks in each step, the peak in bytes, and how many units are kept."""
    model, collectives = one_of_four(**settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(256, WIDTH, device="cuda")
    gathers = []
    for _ in range(steps):
        collectives.calls.clear()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(sum(call.operation == "all_gather" for call in collectives.calls) / GATHERS)
    torch.cuda.synchronize()
    return gathers, torch.cuda.max_memory_allocated(), len(polyshard.report(model).kept)


def test_the_peak_stays_within_the_budget_and_gathers_fall() -> None:
    _, released, _ = train(4)
    for room, kept in ((2 * UNIT + UNIT // 2, 2), (UNIT // 2, 0), (BLOCKS * UNIT + UNIT // 2, BLOCKS)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        gathers, peak, names = train(6, reshard_after_forward="auto", memory_budget=released + room)
        # Where forward turns, a block is kept in any case, once it is known where that is.
        assert names == min(1 + kept, BLOCKS)
        assert gathers == [2 * BLOCKS, 2 * BLOCKS - 1] + [2 * BLOCKS - names] * 4
        assert peak <= released + room


def test_without_a_budget_what_the_device_has_free_is_used() -> None:
    free, total = torch.cuda.mem_get_info()
    if free < total // 4:
        pytest.skip("needs a device that is mostly free")
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    gathers, _, _ = train(4, reshard_after_forward="auto")
    assert gathers == [2 * BLOCKS, 2 * BLOCKS - 1] + [BLOCKS] * 2
    assert torch.cuda.memory_stats()["num_alloc_retries"] == before


def test_nothing_is_decided_inside_a_capture() -> None:
    model, _ = one_of_four(reshard_after_forward="auto", memory_budget="1 TiB")
    x = torch.randn(64, WIDTH, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            # No optimizer steps, so the decision waits.
            model(x).square().mean().backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    assert root_of(model).budget_pending
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        model(x).square().mean().backward()
    graph.replay()
    torch.cuda.synchronize()
    assert root_of(model).budget_pending
