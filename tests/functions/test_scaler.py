"""Torch's ``GradScaler`` and polyshard's: every rank steps or skips, and scales, as the unsharded model does."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import polyshard
import pytest
import torch
from parity import WAYS, Block, Net, draw, local, on_ranks, one_by_one, seeded, sharded_copy, threaded, units_of
from polyshard.errors import ConfigError
from polyshard.planning.meshes import WorldMesh
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MICROBATCHES = 3
TURNS = 6
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


def make_scaler(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=2.0**30, growth_interval=3)


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
    model: nn.Module,
    rank: int,
    turns: int,
    make: MakeOptimizer,
    clips: bool,
    flat: bool = False,
    kind: type[torch.amp.GradScaler] = torch.amp.GradScaler,
) -> tuple[list[float], torch.Tensor]:
    optimizer = make(polyshard.flat_parameters(model) if flat else list(model.parameters()))
    scaler = make_scaler(kind)
    scales = []
    for turn in range(turns):
        scaler.scale(model(slope(turn, rank))).backward()
        scales.append(update(scaler, optimizer, model, clips))
    with polyshard.unsharded(model):
        return scales, torch.cat([p.detach() for p in model.parameters()])


@one_by_one(
    "make",
    [sgd, adam, fused],
    "kind, clips",
    [(torch.amp.GradScaler, False), (torch.amp.GradScaler, True), (polyshard.GradScaler, True)],
    "world_size, settings",
    [
        (2, {"strategy": "full_shard"}),
        (5, {"strategy": "shard_grad_op"}),
        (2, {"strategy": "no_shard"}),
        (4, {"strategy": "hybrid_shard", "shard_size": 2}),
    ],
)
def test_an_overflow_on_one_rank_lets_all_of_them_skip_as_the_unsharded_model_does(
    make: MakeOptimizer, kind: type[torch.amp.GradScaler], clips: bool, world_size: int, settings: dict[str, Any]
) -> None:
    # Of five ranks the last holds nothing.
    wanted, weights = reference(world_size, 6, make, clips)
    assert wanted[:2] == [2.0**29, 2.0**28]
    assert wanted[-1] > 2.0**28 or wanted[-2] > 2.0**28

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], torch.Tensor]:
        return train(polyshard.shard(Slope(), threaded(world, rank, **settings)), rank, 6, make, clips, kind=kind)

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


def test_fp16_gradients_are_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = polyshard.shard(Slope().half(), threaded(world, rank))
        optimizer = sgd(list(model.parameters()))
        scaler = polyshard.GradScaler("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(7, dtype=torch.float16))).backward()
        with pytest.raises(ConfigError, match=rf"fp16 gradients.*rank {rank}"):
            scaler.step(optimizer)

    on_ranks(2, on_rank)


def over_two_meshes(mesh: Any, **settings: Any) -> Any:
    """The second layer's parameters are sharded over ``edp`` alone."""
    policy = {"name": "module_class", "classes": nn.Linear, "overrides": {"1": {"mesh": "edp"}}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = polyshard.ShardConfig(mesh=mesh, shard=("edp", "ep"), policy=policy, **settings)
    return polyshard.shard(model, config)


def test_torchs_own_is_refused_where_gradients_are_over_several_meshes() -> None:
    mesh = WorldMesh.pretended({"edp": 2, "ep": 2})
    model = over_two_meshes(mesh, collectives={"name": "fake", "world_size": 4})
    optimizer = sgd(list(model.parameters()))
    scaler, ours = make_scaler(), make_scaler(polyshard.GradScaler)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    before = model[0].weight.to_local().clone()
    words = r"steps SGD, and the gradient of '1\.weight' is over another mesh.*\(rank 0\).*Use polyshard\.GradScaler"
    with pytest.raises(ConfigError, match=words):
        scaler.step(optimizer)
    assert torch.equal(model[0].weight.to_local(), before)
    # One that does nothing may step anything.
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert not torch.equal(model[0].weight.to_local(), before)
    before = model[0].weight.to_local().clone()
    model.zero_grad()
    ours.scale(model(torch.ones(2, 4)).sum()).backward()
    ours.step(optimizer)
    assert not torch.equal(model[0].weight.to_local(), before)


class Scaled(nn.Module):
    """A scalar comes first, whose gradient every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.scale * x).sum()


def test_torchs_own_is_refused_where_it_would_not_reduce_what_it_found() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> float:
        model = polyshard.shard(Scaled(), threaded(world, rank))
        optimizer = sgd(list(model.parameters()))
        torchs = make_scaler()
        torchs.scale(model(torch.ones(4))).backward()
        with pytest.raises(ConfigError, match=rf"'weight' is cut where the first one is replicated \(rank {rank}\)"):
            torchs.step(optimizer)
        scaler = make_scaler(polyshard.GradScaler)
        scaler.scale(torch.zeros(()))
        if rank == 1:
            local(model.weight.grad)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(local(model.weight), torch.ones(2))
        return scaler.get_scale()

    assert on_ranks(2, on_rank) == [2.0**29, 2.0**29]


def _over_two_meshes(rank: int) -> list[tuple[float, bool]]:
    model = over_two_meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))
    optimizer, scaler = sgd(list(model.parameters())), polyshard.GradScaler("cpu", init_scale=4.0)
    seen = []
    for layer in (None, 0, 1):
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if layer is not None and rank == 3:
            model[layer].weight.grad.to_local()[0, 0] = math.inf
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now = [parameter.to_local() for parameter in model.parameters()]
        seen.append((scaler.get_scale(), all(map(torch.equal, now, before))))
    return seen


@pytest.mark.slow
def test_an_overflow_of_one_mesh_is_skipped_by_the_ranks_of_all() -> None:
    for seen in run_processes(4, _over_two_meshes):
        assert seen == [(4.0, False), (2.0, True), (1.0, True)]


def test_what_is_not_sharded_scales_by_itself() -> None:
    polyshard.shard(Slope(), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    model, scaler = Slope(), make_scaler()
    optimizer = adam(list(model.parameters()))
    scaler.scale(model(slope(0, 0))).backward()
    assert update(scaler, optimizer, model, False) == 2.0**29
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


def microbatch(turn: int, part: int, rank: int) -> torch.Tensor:
    """One element is steep on one rank in one microbatch: 2 ** 15 / 4 times as much is infinite in fp16.

    Powers of two are the same in fp16 to the bit.
    """
    x = torch.full((7,), 2.0 ** -(4 + (turn + part + rank) % 3))
    if part == MICROBATCHES - 1:
        # The last microbatch is of another size.
        x /= 2
    if turn % 3 == 0 and part == 1:
        x[-1] = 8.0 if rank == 1 else 0.0
    return x


def half_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)


def accumulated(world_size: int, clips: bool) -> tuple[list[float], torch.Tensor]:
    """Scales and weights of fp32 weights whose gradients are fp16's of each rank and microbatch, added up in fp32."""
    model, scaler = Slope(), half_scaler()
    parameters = list(model.parameters())
    optimizer, scales = adam(parameters), []
    for turn in range(TURNS):
        scaler.scale(torch.zeros(()))
        total = torch.zeros(7)
        for part in range(MICROBATCHES):
            for rank in range(world_size):
                gradient = (microbatch(turn, part, rank) * scaler.get_scale() / 4).half()
                total += gradient.float() / world_size
        for parameter, gradient in zip(parameters, total.split([4, 3]), strict=True):
            parameter.grad = gradient.clone()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, torch.cat([parameter.detach() for parameter in parameters])


@one_by_one("waits", [False, True], "clips", [False, True], "world_size, settings", WAYS)
def test_an_overflow_of_one_rank_in_one_microbatch_is_skipped_by_all(
    waits: bool, clips: bool, world_size: int, settings: dict[str, Any]
) -> None:
    expected, weights = accumulated(world_size, clips)
    # The scale grew, and an overflow took it back.
    assert 2.0**15 in expected
    assert any(after < before for before, after in pairwise(expected))

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], torch.Tensor]:
        model = polyshard.shard(Slope(), threaded(world, rank, precision="fp16", **settings))
        optimizer, scaler, scales = adam(list(model.parameters())), half_scaler(), []
        for turn in range(TURNS):
            for part in range(MICROBATCHES):
                last = part == MICROBATCHES - 1
                with polyshard.no_sync(model) if waits and not last else nullcontext():
                    scaler.scale(model(microbatch(turn, part, rank)).float() / 4).backward()
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


@pytest.mark.parametrize("precision", ["fp16", {"name": "mixed", "param": "fp16", "reduce": "fp16"}])
@pytest.mark.parametrize("flat", [False, True])
def test_fp16_without_a_scaler_is_told_once(precision: Any, flat: bool) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[bool]:
        model = polyshard.shard(seeded(Net).float(), threaded(world, rank, precision=precision, policy=units_of(Block)))
        optimizer = adam(polyshard.flat_parameters(model) if flat else list(model.parameters()))
        for turn in range(2):
            (model(draw(4, 3, turn=turn, rank=rank).float()).float().square().mean() * 1e-9).backward()
            lost = [not local(p.grad).any() for g in optimizer.param_groups for p in g["params"]]
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
def test_a_scaler_silences_that_whichever_way_it_steps(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net).float(), rank, world, precision="fp16", policy=units_of(Block))
        optimizer, scaler = make(list(model.parameters())), half_scaler()
        scaler.scale(model(draw(4, 3, rank=rank).float()).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.isfinite(local(parameter)).all() for parameter in model.parameters())

    on_ranks(2, on_rank)
