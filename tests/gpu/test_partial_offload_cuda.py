"""``partial`` where host and device are two; its CPU twin is ``test_partial_offload``."""

from __future__ import annotations

import copy
import functools
from typing import Any

import polyshard
import pytest
import torch
from cuda_models import sharded
from parity import local
from polyshard.interfaces import UnitSpec
from polyshard_plugins.offload import PartialOffload
from polyshard_testing import plugin_context
from processes import KeptRanks, gpu_ranks, settle_on_device
from torch import nn

pytestmark = pytest.mark.gpu


WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = functools.partial(RANKS.run, WORLD_SIZE)
# Large enough that a copy (32 MiB and more) takes far longer than the host needs to get to its next call.
NUMEL = 8 * 2**20
CYCLES_OF_DELAY = 200_000_000


def partial(device: torch.device, **options: Any) -> PartialOffload:
    return PartialOffload(plugin_context("partial", device), **options)


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 24)
        self.blocks = nn.ModuleList(Block(24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(
    rank: int, options: dict[str, Any], fused: bool, settings: dict[str, Any]
) -> tuple[list[float], set[str], tuple[str, ...]]:
    """Largest differences in loss and norm (relative) and in parameters; devices of state; what was offloaded."""
    device = settle_on_device(rank)
    torch.manual_seed(0)
    reference = Net().to(device, torch.float64)
    model = sharded(copy.deepcopy(reference), Block, offload=partial(device, **options), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    off = [0.0, 0.0]
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        batches = [
            torch.randn(4 * WORLD_SIZE, 7, generator=generator, dtype=torch.float64).to(device) for _ in range(2)
        ]
        for x in batches:
            # Both are reduced: what is offloaded adds up on the host, the rest here.
            loss = model(x.chunk(WORLD_SIZE)[rank])
            loss.backward()
            whole = reference(x)
            whole.backward()
        norm = polyshard.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        expected.step()
        expected.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        off[0] = max(off[0], abs((mean / WORLD_SIZE - whole).item()) / whole.item())
        off[1] = max(off[1], abs((norm - wanted).item()) / wanted.item())
    devices = {str(state["exp_avg"].device.type) for state in optimizer.state.values()}
    with polyshard.unsharded(model):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        off.append(max((one - other).abs().max().item() for one, other in pairs))
    return off, devices, polyshard.report(model).offloaded


@pytest.mark.parametrize(
    ("options", "strategy", "fused"),
    [
        ({"units": "blocks.[02]"}, "full_shard", True),
        ({"units": "blocks.[02]"}, "shard_grad_op", False),
        ({"units": ["(root)", "blocks.1"], "inner": "optimizer"}, "full_shard", False),
        ({"units": ["(root)", "blocks.1"], "inner": "optimizer"}, "no_shard", True),
        ({"device_bytes": "150 kB", "inner": {"name": "cpu", "pin_memory": False}}, "shard_grad_op", True),
        ({"device_bytes": "150 kB", "inner": {"name": "cpu", "pin_memory": False}}, "no_shard", False),
    ],
    ids=str,
)
def test_training_equals_the_unsharded_model(options: dict[str, Any], strategy: str, fused: bool) -> None:
    for (loss, norm, parameters), devices, offloaded in run(train, options, fused, {"strategy": strategy}):
        assert loss < 1e-12
        assert norm < 1e-12
        assert parameters < 1e-10
        assert devices == {"cpu", "cuda"}
        assert 0 < len(offloaded) < 5


def scaled(rank: int, fused: bool) -> tuple[list[bool], float, float]:
    """Which of ten steps were skipped, what the others err by, and the scale behind them; the device is busy."""
    device = settle_on_device(rank)
    torch.manual_seed(0)
    model = sharded(Net().to(device), Block, offload=partial(device, units="blocks.1"))
    # Without memory, so that a step is `lr * gradient / (|gradient| + 1)`. Of DTensors, torch has no fused SGD.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.0, 0.0), eps=1.0, fused=fused)
    scaler = polyshard.GradScaler("cuda", init_scale=1024.0)
    busy = torch.randn(4096, 4096, device=device)
    skipped, error = [], 0.0
    for turn in range(10):
        scaler.scale(model(torch.randn(4, 7, device=device))).backward()
        scale = scaler.get_scale()
        offloaded = model.blocks[1].up.weight
        if turn % 2 and rank == 0:
            assert offloaded.grad is not None
            local(offloaded.grad)[0, 0] = torch.inf
        held = [(local(each.detach()), local(each.grad).clone()) for each in model.parameters()]
        before = [parameter.clone() for parameter, _ in held]
        for _ in range(20):
            busy @ busy
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moves = [(old - parameter, grad) for (parameter, grad), old in zip(held, before, strict=True)]
        skipped.append(not any(moved.any() for moved, _ in moves))
        if not skipped[-1]:
            errors = [(moved - 0.1 * grad / (grad.abs() + scale)).abs().amax().item() for moved, grad in moves]
            error = max(error, *errors)
    return skipped, error, scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_on_the_device_unscales_and_judges_gradients_on_the_host(fused: bool) -> None:
    for skipped, error, scale in run(scaled, fused):
        assert skipped == [False, True] * 5
        assert error < 1e-6
        assert scale == 1024.0 / 2**5


def unit(name: str) -> UnitSpec:
    return UnitSpec(name, nn.Linear, (), 2 * NUMEL, NUMEL, torch.float32, cuda(), False)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_kept_slice_is_served_on_the_device_and_does_not_hold_up_the_host(compute: torch.dtype) -> None:
    offload, spec = partial(cuda(), units="*", inner="optimizer"), unit("layers.0")
    master = offload.place(spec, torch.ones(NUMEL, device=cuda()))
    assert master.is_pinned()
    own_slice = torch.zeros(NUMEL, dtype=compute, device=cuda())
    offload.begin_forward()
    offload.fetch(spec, master, own_slice)
    torch.cuda.synchronize()
    own_slice.zero_()
    # What the host writes in the middle of a step is not what the backward computes with.
    master.fill_(2.0)
    torch.cuda._sleep(CYCLES_OF_DELAY)
    offload.fetch(spec, master, own_slice)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert own_slice.eq(1).all()
    offload.begin_forward()
    offload.fetch(spec, master, own_slice)
    torch.cuda.synchronize()
    assert own_slice.eq(2).all()


def test_sync_for_step_waits_for_copies_from_masters_whose_slices_are_kept() -> None:
    offload, spec = partial(cuda(), units="*", inner="optimizer"), unit("layers.0")
    master = offload.place(spec, torch.ones(NUMEL, device=cuda()))
    own_slice = torch.zeros(NUMEL, device=cuda())
    gather = torch.cuda.Stream()
    gather.wait_stream(torch.cuda.current_stream())
    offload.begin_forward()
    with torch.cuda.stream(gather):
        torch.cuda._sleep(CYCLES_OF_DELAY)
        offload.fetch(spec, master, own_slice)
    offload.sync_for_step()
    master.fill_(2.0)
    torch.cuda.synchronize()
    assert own_slice.eq(1).all()
