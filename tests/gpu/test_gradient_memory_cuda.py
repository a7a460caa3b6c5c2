"""That ``zero_grad`` gives the memory of gradients back to the allocator; CPU twin: ``test_engine_gradient_memory``."""

from __future__ import annotations

from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from cuda_models import sharded
from parity import local
from processes import KeptRanks, gpu_ranks
from torch import nn

pytestmark = pytest.mark.gpu


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
