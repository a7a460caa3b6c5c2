"""``reshard_after_forward="auto"`` by what CUDA's allocator measures; its CPU twin is ``test_memory_budget``."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from typing import Any

import polyshard
import psutil
import pytest
import torch
from cuda_models import sharded
from parity import local
from polyshard.interfaces import PluginContext
from polyshard.runtime.root import Root
from polyshard_backends.fake import FakeCollectives
from processes import KeptRanks, gpu_ranks, share_device
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


# That ``zero_grad`` gives the memory of gradients back to the allocator; CPU twin: ``test_engine_gradient_memory``.


WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)
#: The CUDA allocator hands out multiples of so many bytes.
GRANULE = 512


def held_by(parameters: list[torch.Tensor]) -> int:
    """Bytes that the allocator gave to the gradients of ``parameters``."""
    found = {}
    for parameter in parameters:
        if parameter.grad is not None:
            storage = local(parameter.grad).untyped_storage()
            found[storage.data_ptr()] = -(-storage.nbytes() // GRANULE) * GRANULE
    return sum(found.values())


def freed_by_zero_grad(rank: int, settings: dict[str, Any], flat: bool) -> list[tuple[int, int]]:
    """(bytes of gradients, bytes that ``zero_grad`` freed) of three steps."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).to(device)
    model = sharded(model, nn.Linear, **settings)
    parameters = list(polyshard.flat_parameters(model)) if flat else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    seen = []
    for _ in range(3):
        model(torch.randn(8, 512, device=device)).square().sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        held, before = held_by(parameters), torch.cuda.memory_allocated()
        optimizer.zero_grad(set_to_none=True)
        seen.append((held, before - torch.cuda.memory_allocated()))
    return seen


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_nbytes": 0},
        {"strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
        {"precision": {"name": "mixed", "param": "bfloat16", "reduce": "bfloat16"}},
    ],
)
def test_zero_grad_frees_gradients_at_once(settings: dict[str, Any], flat: bool) -> None:
    ranks = run(freed_by_zero_grad, settings, flat)
    # 4 x 512 x 512 values of 4 bytes.
    shards = 1 if settings.get("strategy") == "no_shard" else WORLD_SIZE
    for seen in ranks:
        assert all(freed == held for held, freed in seen), seen
        assert all(held >= 4 * 2**20 // shards for held, _ in seen), seen


# Two thousand steps on devices: what the allocators hold does not grow. CPU twin: ``tests/faults/test_soak.py``.


STEPS, WARM = 2000, 200


def train_long(rank: int) -> tuple[list[int], list[int]]:
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
    for reserved, resident in RANKS.run(WORLD_SIZE, train_long, timeout=150.0):
        assert reserved[-1] == reserved[0], reserved
        assert resident[-1] - resident[0] < 16 << 20, resident
