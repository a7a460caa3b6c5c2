"""fp16, loss scaling and accumulation together: every rank skips, steps and scales as the unsharded model does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded, sharded_copy, threaded, units_of
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

STRATEGIES = [
    (2, {"strategy": "full_shard"}),
    (3, {"strategy": "shard_grad_op"}),
    (2, {"strategy": "no_shard"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]
MICROBATCHES = 3
TURNS = 6
Parameters = list[nn.Parameter]


class Slope(nn.Module):
    """Its gradient is its input, to the bit in fp16 where that is a power of two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(0.5, 2.0, 7))
        self.second = nn.Parameter(torch.linspace(-1.0, 1.0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.first, self.second]) * x).sum()


def slope(turn: int, part: int, rank: int) -> torch.Tensor:
    """One element is steep on one rank in one microbatch: 2 ** 15 / 4 times as much is infinite in fp16."""
    x = torch.full((12,), 2.0 ** -(4 + (turn + part + rank) % 3))
    if part == MICROBATCHES - 1:
        # The last microbatch is of another size.
        x /= 2
    if turn % 3 == 0 and part == 1:
        x[-1] = 8.0 if rank == 1 else 0.0
    return x


def adam(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def reference(world_size: int, clips: bool) -> tuple[list[float], torch.Tensor]:
    """Scales and weights of fp32 weights whose gradients are fp16's of each rank and microbatch, added up in fp32."""
    model, scaler = Slope(), make_scaler()
    parameters = list(model.parameters())
    optimizer, scales = adam(parameters), []
    for turn in range(TURNS):
        scaler.scale(torch.zeros(()))
        total = torch.zeros(12)
        for part in range(MICROBATCHES):
            for rank in range(world_size):
                gradient = (slope(turn, part, rank) * scaler.get_scale() / 4).half()
                total += gradient.float() / world_size
        for parameter, gradient in zip(parameters, total.split([7, 5]), strict=True):
            parameter.grad = gradient.clone()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("waits", [False, True], ids=["reduced each", "no_sync"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize(("world_size", "settings"), STRATEGIES)
def test_an_overflow_of_one_rank_in_one_microbatch_is_skipped_by_all(
    waits: bool, clips: bool, world_size: int, settings: dict[str, Any]
) -> None:
    expected, weights = reference(world_size, clips)
    # The scale grew, and an overflow took it back.
    assert 2.0**15 in expected
    assert any(after < before for before, after in pairwise(expected))

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], torch.Tensor]:
        model = polyshard.shard(Slope(), threaded(world, rank, precision="fp16", **settings))
        optimizer, scaler, scales = adam(list(model.parameters())), make_scaler(), []
        for turn in range(TURNS):
            for part in range(MICROBATCHES):
                last = part == MICROBATCHES - 1
                with polyshard.no_sync(model) if waits and not last else nullcontext():
                    scaler.scale(model(slope(turn, part, rank)).float() / 4).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        with polyshard.unsharded(model):
            return scales, torch.cat([parameter.detach() for parameter in model.parameters()])

    for scales, got in on_ranks(world_size, on_rank):
        assert scales == expected
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=1e-7)


def test_two_optimizers_share_a_scaler_that_goes_on_from_its_state() -> None:
    def update(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer]) -> None:
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        for each in optimizers:
            each.zero_grad()

    def turns(model: nn.Module, scaler: torch.amp.GradScaler, backward: Callable[[int, Any], None]) -> list[float]:
        parameters = list(model.parameters())
        optimizers = [adam(parameters[:1]), torch.optim.SGD(parameters[1:], lr=0.01)]
        scales = []
        for turn in range(TURNS):
            if turn == 3:
                state = scaler.state_dict()
                scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=7)
                scaler.load_state_dict(state)
            backward(turn, scaler)
            update(scaler, optimizers)
            scales.append(scaler.get_scale())
        return scales

    plain = Slope()

    def steep(turn: int, rank: int) -> torch.Tensor:
        x = torch.full((12,), 2.0**-turn)
        # 2 ** 29 times as much is infinite in fp32: of the second parameter alone, on one rank.
        x[-1] = 1e30 if rank == 1 and turn in (0, 4) else 0.0
        return x

    def whole(turn: int, scaler: torch.amp.GradScaler) -> None:
        for rank in range(2):
            scaler.scale(plain(steep(turn, rank))).backward()
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2

    expected = turns(plain, torch.amp.GradScaler("cpu", init_scale=2.0**29, growth_interval=2), whole)
    assert expected[0] == 2.0**28

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], torch.Tensor]:
        # Made before the model is sharded.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**29, growth_interval=2)
        model = polyshard.shard(Slope(), threaded(world, rank))

        def own(turn: int, scaler: torch.amp.GradScaler) -> None:
            scaler.scale(model(steep(turn, rank))).backward()

        scales = turns(model, scaler, own)
        with polyshard.unsharded(model):
            return scales, torch.cat([parameter.detach() for parameter in model.parameters()])

    weights = torch.cat([parameter.detach() for parameter in plain.parameters()])
    for scales, got in on_ranks(2, on_rank):
        assert scales == expected
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("precision", ["fp16", {"name": "mixed", "param": "fp16", "reduce": "fp16"}])
@pytest.mark.parametrize("flat", [False, True])
def test_fp16_without_a_scaler_is_told_once(precision: Any, flat: bool) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[bool]:
        model = polyshard.shard(seeded(Net).float(), threaded(world, rank, precision=precision, policy=units_of(Block)))
        optimizer = adam(polyshard.flat_parameters(model) if flat else list(model.parameters()))
        for turn in range(2):
            (model(draw(4, 3, turn=turn, rank=rank).float()).float().square().mean() * 1e-9).backward()
            lost = [not p.grad.any() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            optimizer.step()
        return lost

    with pytest.warns(
        UserWarning, match=r"Adam steps without a torch\.amp\.GradScaler.*small ones become zero"
    ) as told:
        ranks = on_ranks(2, on_rank)
    assert len(told) == 1
    # What it is about.
    assert all(all(lost) for lost in ranks)


@pytest.mark.parametrize("make", [adam, lambda parameters: torch.optim.AdamW(parameters, fused=True)])
def test_a_scaler_silences_that_whichever_way_it_steps(make: Callable[[Parameters], torch.optim.Optimizer]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net).float(), rank, world, precision="fp16", policy=units_of(Block))
        optimizer, scaler = make(list(model.parameters())), make_scaler()
        scaler.scale(model(draw(4, 3, rank=rank).float()).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())

    on_ranks(2, on_rank)
