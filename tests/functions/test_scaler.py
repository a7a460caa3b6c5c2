"""``torch.amp.GradScaler`` over shards: every rank steps or skips, and scales, as the unsharded model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import on_ranks, threaded
from polyshard.errors import ConfigError
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from torch import nn

#: Of the last weight on rank 0: 2 ** 29 times as much is infinite in fp32, 2 ** 28 times is not.
STEEP = 1e30
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Slope(nn.Module):
    """Two parameters whose gradients are the input."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.steep = nn.Parameter(torch.tensor([5.0, 6.0, 7.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.flat, self.steep]) * x).sum()


def slope(turn: int, rank: int) -> torch.Tensor:
    x = torch.arange(1.0, 8.0) * (rank + 1) / (turn + 1)
    x[-1] = STEEP if rank == 0 else 0.0
    return x


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)


def update(scaler: Any, optimizer: torch.optim.Optimizer, model: nn.Module, clips: bool) -> float:
    if clips:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e29)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(scaler.get_scale())


def reference(world_size: int, turns: int, make: MakeOptimizer, clips: bool) -> tuple[list[float], torch.Tensor]:
    """Scales by turn, and all weights after the last, of unsharded copies whose gradients are averaged."""
    copies = [Slope() for _ in range(world_size)]
    scalers = [make_scaler() for _ in copies]
    optimizers = [make(list(each.parameters())) for each in copies]
    scales = []
    for turn in range(turns):
        for rank, each in enumerate(copies):
            scalers[rank].scale(each(slope(turn, rank))).backward()
        for same in zip(*(each.parameters() for each in copies), strict=True):
            mean = sum(each.grad for each in same if each.grad is not None) / world_size
            for each in same:
                each.grad = mean.clone()  # type: ignore[union-attr]
        seen = {update(*each, clips) for each in zip(scalers, optimizers, copies, strict=True)}
        assert len(seen) == 1
        scales += seen
    return scales, torch.cat([p.detach() for p in copies[0].parameters()])


def train(
    model: nn.Module, rank: int, turns: int, make: MakeOptimizer, clips: bool, flat: bool = False
) -> tuple[list[float], torch.Tensor]:
    optimizer = make(polyshard.flat_parameters(model) if flat else list(model.parameters()))
    scaler = make_scaler()
    scales = []
    for turn in range(turns):
        scaler.scale(model(slope(turn, rank))).backward()
        scales.append(update(scaler, optimizer, model, clips))
    with polyshard.unsharded(model):
        return scales, torch.cat([p.detach() for p in model.parameters()])


@pytest.mark.parametrize("make", [sgd, adam, fused])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (2, {"strategy": "full_shard"}),
        (5, {"strategy": "shard_grad_op"}),
        (2, {"strategy": "no_shard"}),
        (4, {"strategy": "hybrid_shard", "shard_size": 2}),
    ],
)
def test_an_overflow_on_one_rank_lets_all_of_them_skip_as_the_unsharded_model_does(
    make: MakeOptimizer, clips: bool, world_size: int, settings: dict[str, Any]
) -> None:
    # Of five ranks the last holds nothing.
    wanted, weights = reference(world_size, 6, make, clips)
    assert wanted[:2] == [2.0**29, 2.0**28]
    assert wanted[-1] > 2.0**28 or wanted[-2] > 2.0**28

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], torch.Tensor]:
        return train(polyshard.shard(Slope(), threaded(world, rank, **settings)), rank, 6, make, clips)

    for scales, got in on_ranks(world_size, on_rank):
        assert scales == wanted
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=0)


def test_flat_parameters_skip_alike() -> None:
    wanted, weights = reference(3, 4, adam, True)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], torch.Tensor]:
        return train(polyshard.shard(Slope(), threaded(world, rank)), rank, 4, adam, True, flat=True)

    for scales, got in on_ranks(3, on_rank):
        assert scales == wanted
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=0)


def test_fp16_gradients_are_refused_on_ranks_without_any_too() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> int:
        model = polyshard.shard(Slope().half(), threaded(world, rank))
        optimizer = sgd(list(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(7, dtype=torch.float16))).backward()
        with pytest.raises(ConfigError, match=rf"fp16 gradients.*rank {rank}"):
            scaler.step(optimizer)
        return sum(p.numel() for p in model.parameters())

    assert on_ranks(5, on_rank)[-1] == 0


def test_what_is_not_sharded_scales_by_itself() -> None:
    polyshard.shard(Slope(), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    model, scaler = Slope(), make_scaler()
    optimizer = adam(list(model.parameters()))
    scaler.scale(model(slope(0, 0))).backward()
    assert update(scaler, optimizer, model, False) == 2.0**29
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


def _on_process(rank: int) -> tuple[list[float], torch.Tensor]:
    return train(polyshard.shard(Slope(), polyshard.ShardConfig()), rank, 4, fused, False)


@pytest.mark.slow
def test_on_processes() -> None:
    wanted, weights = reference(2, 4, fused, False)
    for scales, got in run_processes(2, _on_process):
        assert scales == wanted
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=0)
