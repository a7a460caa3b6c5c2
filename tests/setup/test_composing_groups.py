"""Modules composed inside out whose ranks differ: each keeps its own."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from parity import local
from torch import nn


def fake(world_size: int, **settings: Any) -> polyshard.ShardConfig:
    return polyshard.ShardConfig(collectives={"name": "fake", "world_size": world_size}, **settings)


def local_elements(module: nn.Module) -> int:
    return sum(local(parameter).numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (fake(4), fake(8)),
        (fake(8, strategy="hybrid_shard", shard_size=2), fake(8, strategy="hybrid_shard", shard_size=4)),
        (fake(8, strategy="no_shard"), fake(8)),
    ],
)
def test_an_inner_module_over_other_ranks_trains(inner: polyshard.ShardConfig, outer: polyshard.ShardConfig) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    polyshard.fully_shard(model[0], inner)
    kept = local_elements(model[0])
    polyshard.fully_shard(model, outer)
    assert local_elements(model[0]) == kept
    assert local_elements(model[1]) != kept
    before = [local(parameter.detach()).clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).square().mean().backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(local(now), then) for now, then in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize(("batch_nbytes", "beyond"), [(0, 0), (64 * 64 * 4, 0), (64 * 64 * 4 * 3, 2), ("16 MiB", 5)])
def test_the_report_counts_as_many_units_as_are_prefetched(ahead: int, batch_nbytes: int | str, beyond: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    policy = {"name": "module_class", "classes": nn.Linear}
    settings: dict[str, Any] = {"forward_prefetch": ahead, "backward_prefetch": 0, "batch_nbytes": batch_nbytes}
    polyshard.shard(model, fake(4, policy=policy, **settings))
    # Where nothing is prefetched, there are no batches; elsewhere two of them are there at once. There are six units.
    units = min(6, max(1 + ahead + beyond, 2 * (1 + beyond))) if ahead else 1
    assert polyshard.report(model).gathered_nbytes == units * 64 * 64 * 4


def test_the_report_counts_reductions_as_wide_as_they_travel() -> None:
    # Nothing is scattered without shards: what is all-reduced is fp32, two reductions at once.
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    policy = {"name": "module_class", "classes": nn.Linear}
    polyshard.shard(model, fake(4, policy=policy, strategy="no_shard", precision="bf16"))
    assert polyshard.report(model).reduction_nbytes == 2 * 64 * 64 * 4
