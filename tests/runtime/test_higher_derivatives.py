"""Derivatives of derivatives, and forwards under transforms, under all APIs against unsharded copies of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polyshard
import polyshard_fsdp
import polyshard_fsdp2
import pytest
import torch
import torch.distributed as dist
from parity import Block, Net, draw, seeded, train_reference, units_of
from polyshard import ShardConfig
from polyshard_fsdp.wrap import ModuleWrapPolicy
from processes import RankPool
from torch import nn
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, vmap
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow

RANKS, TURNS = 2, 3


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    """Torch has one level of forward differentiation in a process, which ranks that are threads would share."""
    with RankPool(RANKS) as pool:
        yield pool


def native(model: nn.Module, **settings: Any) -> nn.Module:
    return polyshard.shard(model, ShardConfig(policy=units_of(Block), **settings))


def fully_sharded(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for block in model.modules():
        if isinstance(block, Block):
            polyshard_fsdp2.fully_shard(block, mesh=mesh)
    return polyshard_fsdp2.fully_shard(model, mesh=mesh)


def wrapped(model: nn.Module) -> nn.Module:
    return polyshard_fsdp.FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )


APIS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "shard": native,
    "shard, kept": lambda model: native(model, strategy="shard_grad_op"),
    "no_shard": lambda model: native(model, strategy="no_shard"),
    "fully_shard": fully_sharded,
    "FullyShardedDataParallel": wrapped,
}


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Forces(Net):
    """An energy, and its gradient by the positions, computed inside of the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = x.detach().requires_grad_()
        energy = super().forward(positions)
        (forces,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return torch.cat([energy, forces], dim=1)


class Straight(Net):
    """Nothing that a second derivative needs from the forward: backwards go through what backwards computed alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StraightBlock() for _ in range(3))


class StraightBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Flows(Net):
    """A transform around a part of the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

        x = self.first(x)
        output, tangent = jvp(inner, (x,), (torch.ones_like(x),))
        return self.last(output + tangent)


Derived = Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, ...]]


def slope(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output, gradient


def slope_alone(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return slope(model, x)[1:]


def curvature(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    output, first = slope(model, x)
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return output, first, second


def twice_backwards(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = torch.autograd.functional.jvp(model, (x,), (x.flip(0),), create_graph=True)
    return found


def along(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = jvp(model, (x,), (x.flip(0),))
    return found


def tangent_alone(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return along(model, x)[1:]


def dual(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x.requires_grad_(), x.detach().flip(0))))
    return found.primal, found.tangent


def one_by_one(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (vmap(model)(x),)


def jacobians(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (vmap(jacfwd(model))(x),)


def plainly(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (model(x),)


CASES: dict[str, tuple[type[Net], Derived]] = {
    "a gradient penalty": (Net, slope),
    "a gradient alone": (Net, slope_alone),
    "a gradient alone, of a linear model": (Straight, slope_alone),
    "two derivatives": (Net, curvature),
    "two derivatives through checkpoints": (Checkpointed, curvature),
    "forces inside of the forward": (Forces, plainly),
    "torch.autograd.functional.jvp": (Net, twice_backwards),
    "torch.func.jvp": (Net, along),
    "a tangent alone": (Net, tangent_alone),
    "torch.func.jvp inside of the forward": (Flows, plainly),
    "dual tensors": (Net, dual),
    "vmap": (Net, one_by_one),
    "Jacobians": (Net, jacobians),
}


def step_of(case: str) -> Callable[[nn.Module, int, int], list[torch.Tensor]]:
    derived = CASES[case][1]

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = torch.stack([each.square().mean() for each in derived(model, draw(4, 3, turn=turn, rank=rank))]).sum()
        loss.backward()
        return [loss.detach()]

    return step


def _losses(rank: int, case: str) -> dict[str, list[float]]:
    found = {}
    for api, shard in APIS.items():
        model = shard(seeded(CASES[case][0]))
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), step_of(case)
        found[api] = []
        for turn in range(TURNS):
            found[api] += [float(loss) for loss in step(model, turn, rank)]
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_unsharded_model(case: str, processes: RankPool) -> None:
    expected = train_reference(seeded(CASES[case][0]), step_of(case), RANKS, TURNS).observed
    for rank, found in enumerate(processes.run(_losses, case)):
        wanted = [float(expected[turn][rank][0]) for turn in range(TURNS)]
        for api, losses in found.items():
            assert losses == pytest.approx(wanted, rel=1e-11, abs=1e-11), api
