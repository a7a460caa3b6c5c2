"""QLoRA with torchao's NF4 tensors under ``fully_shard``, as torchtune has it: they gather themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from parity import draw, seed_all
from processes import KeptRanks
from torch import nn


def nf4() -> Any:
    """torchao's module; what it warns of when it is imported is its own affair."""
    with warnings.catch_warnings(action="ignore"):
        return pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")


class Adapted(nn.Module):
    """A frozen layer in NF4, and an adapter."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nf4().to_nf4(torch.randn(outer, inner) / inner**0.5, 64, 4), requires_grad=False)
        self.a, self.b = nn.Linear(inner, 4, bias=False), nn.Linear(4, outer, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nf4().linear_nf4(x, self.weight) + self.b(self.a(x))
        return out


def make() -> nn.Sequential:
    seed_all(0)
    # Rows that two and three ranks cut evenly: torchao's tensors are cut no other way.
    return nn.Sequential(Adapted(64, 192), nn.Tanh(), Adapted(192, 96))


def train(model: nn.Module, ranks: list[int]) -> list[list[float]]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    found = []
    for turn in range(20):
        inputs = [draw(8, 64, turn=turn, rank=rank).float() for rank in ranks]
        losses = [(model(x) - 1).square().mean() for x in inputs]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def of_adapters(rank: int, world_size: int) -> tuple[list[float], list[float], int, bool]:
    warnings.simplefilter("ignore")
    from polyshard_fsdp2 import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    plain, model = make(), make()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    losses = [loss for (loss,) in train(model, [rank])]
    wanted = [step[rank] for step in train(plain, list(range(world_size)))]
    weight: Any = model[0].weight
    whole: Any = plain[0].weight
    rows = weight.to_local().quantized_data
    own = whole.quantized_data.chunk(world_size)[rank]
    return losses, wanted, rows.numel(), torch.equal(rows, own)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_twenty_steps_are_the_unsharded_models(ranks: KeptRanks, world_size: int) -> None:
    nf4()
    for losses, wanted, numel, same in ranks.run(world_size, of_adapters, world_size, timeout=200.0):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert numel == 192 * 64 // 2 // world_size
        assert same
