"""CPU offload under a CUDA device: pinned memory, asynchronous copies, and the orders that they need."""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace
from typing import Any

import polyshard
import pytest
import torch
from cuda_models import sharded
from parity import local, whole
from polyshard.interfaces import PluginContext, UnitSpec
from polyshard.optim import step_in_backward
from polyshard_plugins.offload import CpuOffload, PartialOffload
from polyshard_testing import plugin_context
from processes import KeptRanks, gpu_ranks, settle_on_device
from torch import nn

pytestmark = pytest.mark.gpu

# Large enough that a copy (32 MiB and more) takes far longer than the host needs to get to its next call.
NUMEL = 8 * 2**20
CYCLES_OF_DELAY = 200_000_000


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def manager(pin_memory: bool = True) -> CpuOffload:
    return CpuOffload(PluginContext(name="cpu", device=cuda()), pin_memory=pin_memory)


def unit(numel: int = NUMEL) -> UnitSpec:
    return UnitSpec(
        name="layers.0",
        module_class=nn.Linear,
        parameter_names=("layers.0.weight",),
        numel=2 * numel,
        shard_numel=numel,
        master_dtype=torch.float32,
        device=cuda(),
        is_root=False,
    )


@pytest.mark.parametrize("pin_memory", [True, False])
def test_masters_live_on_the_host_pinned_if_asked(pin_memory: bool) -> None:
    spec = unit(1000)
    shard = torch.arange(1000.0, device=cuda())
    master = manager(pin_memory).place(spec, shard)
    assert master.device.type == "cpu"
    assert master.is_pinned() is pin_memory
    assert torch.equal(master, torch.arange(1000.0))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_fetch_does_not_hold_up_the_host(compute: torch.dtype) -> None:
    offload, spec = manager(), unit()
    master = offload.place(spec, torch.ones(NUMEL, device=cuda()))
    own_slice = torch.zeros(NUMEL, dtype=compute, device=cuda())
    offload.fetch(spec, master, own_slice)
    torch.cuda.synchronize()
    own_slice.zero_()
    torch.cuda._sleep(CYCLES_OF_DELAY)
    offload.fetch(spec, master, own_slice)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert own_slice.eq(1).all()


def test_a_second_fetch_does_not_overwrite_the_staging_buffer_of_the_first() -> None:
    offload, spec = manager(), unit()
    master = offload.place(spec, torch.ones(NUMEL, device=cuda()))
    first, second = (torch.zeros(NUMEL, dtype=torch.bfloat16, device=cuda()) for _ in range(2))
    torch.cuda._sleep(CYCLES_OF_DELAY)
    offload.fetch(spec, master, first)
    master.fill_(2.0)
    offload.fetch(spec, master, second)
    torch.cuda.synchronize()
    assert first.eq(1).all()
    assert second.eq(2).all()


def test_a_forward_fetches_what_masters_are_when_it_begins() -> None:
    offload = manager()
    specs = [replace(unit(), name=f"layers.{index}") for index in range(3)]
    masters = [offload.place(spec, torch.zeros(NUMEL, device=cuda())) for spec in specs]
    slices = [torch.zeros(NUMEL, dtype=torch.bfloat16, device=cuda()) for _ in specs]
    for turn in range(1, 4):
        for index, master in enumerate(masters):
            master.fill_(10.0 * turn + index)
        # Twice, as for a gather between steps.
        offload.begin_forward()
        offload.begin_forward()
        # The last one is not fetched in each forward.
        for spec, master, own_slice in list(zip(specs, masters, slices, strict=True))[: 2 + turn % 2]:
            offload.fetch(spec, master, own_slice)
        torch.cuda.synchronize()
        assert [own_slice.float().unique().tolist() for own_slice in slices[:2]] == [[10.0 * turn], [10.0 * turn + 1]]
    assert slices[2].eq(32).all()


def test_the_optimizer_does_not_overtake_a_copy_from_the_master_itself() -> None:
    offload, spec = manager(), unit()
    master = offload.place(spec, torch.ones(NUMEL, device=cuda()))
    own_slice = torch.zeros(NUMEL, device=cuda())
    gather = torch.cuda.Stream()
    gather.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(gather):
        torch.cuda._sleep(CYCLES_OF_DELAY)
        offload.fetch(spec, master, own_slice)
    offload.sync_for_step()
    master.fill_(2.0)
    torch.cuda.synchronize()
    assert own_slice.eq(1).all()


def test_accumulation_happens_after_both_gradients_have_arrived_from_their_streams() -> None:
    offload, spec = manager(), unit()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    grads = [torch.full((NUMEL,), value, device=cuda()) for value in (1.0, 10.0)]
    torch.cuda.synchronize()
    stored = None
    # The first gradient arrives last: its stream is the one that is delayed.
    for delay, stream, grad in zip((CYCLES_OF_DELAY, 0), streams, grads, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(delay)
            stored = offload.store_grad(spec, grad, stored)
    assert stored is not None
    assert stored.is_pinned()
    offload.sync_for_step()
    assert stored.eq(11).all()
    torch.cuda.synchronize()


def test_gradients_of_an_earlier_step_stay_as_they_were() -> None:
    offload, spec = manager(), unit(1000)
    kept = []
    for value in (1.0, 2.0, 3.0):
        kept.append(offload.store_grad(spec, torch.full((1000,), value, device=cuda()), None))
        offload.sync_for_step()
    assert [grad[0].item() for grad in kept] == [1.0, 2.0, 3.0]
    assert all(grad.eq(value).all() for grad, value in zip(kept, itertools.count(1)))


# ``partial`` where host and device are two; its CPU twin is ``test_partial_offload``.


WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = functools.partial(RANKS.run, WORLD_SIZE)


def partial(device: torch.device, **options: Any) -> PartialOffload:
    return PartialOffload(plugin_context("partial", device), **options)


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


def named_unit(name: str) -> UnitSpec:
    return UnitSpec(name, nn.Linear, (), 2 * NUMEL, NUMEL, torch.float32, cuda(), False)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_kept_slice_is_served_on_the_device_and_does_not_hold_up_the_host(compute: torch.dtype) -> None:
    offload, spec = partial(cuda(), units="*", inner="optimizer"), named_unit("layers.0")
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
    offload, spec = partial(cuda(), units="*", inner="optimizer"), named_unit("layers.0")
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


# ``step_in_backward`` where gradients are on their way to the host; its CPU twin is ``test_backward_steps``.


def train_in_backward(rank: int, settings: dict[str, Any], flat: bool, most: float | None) -> tuple[float, list[str]]:
    """How far parameters are from an unsharded model's, as a share of what training changed; where state is.

    ``most``: norm of gradients; None for any.
    """
    device, dtype = settle_on_device(rank), torch.float32 if "precision" in settings else torch.float64
    torch.manual_seed(0)
    # Copies of a unit take far longer than the host needs to get to its next call.
    start = nn.Sequential(*(Block(1024) for _ in range(6))).to(device, dtype)
    model, plain = sharded(copy.deepcopy(start), Block, batch_nbytes=0, **settings), copy.deepcopy(start)
    given = polyshard.flat_parameters(model) if flat else list(model.parameters())
    optimizer, reference = (torch.optim.AdamW(each, lr=1e-3, fused=True) for each in (given, plain.parameters()))
    step_in_backward(model, optimizer, keeps_former=most is not None)
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        batch = torch.randn(64 * WORLD_SIZE, 1024, generator=generator, dtype=dtype).to(device)
        model(batch.chunk(WORLD_SIZE)[rank]).square().mean().backward()
        plain(batch).square().mean().backward()
        if most is not None:
            polyshard.clip_grad_norm_(model, most)
            nn.utils.clip_grad_norm_(plain.parameters(), most)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    got, wanted, before = (
        torch.cat([each.detach().flatten() for each in values])
        for values in (whole(model).values(), plain.parameters(), start.parameters())
    )
    devices = sorted({state["exp_avg"].device.type for state in optimizer.state.values()})
    return float((got - wanted).norm() / (wanted - before).norm()), devices


# The norm falls from step to step.
@pytest.mark.parametrize(("flat", "most"), [(True, None), (False, None), (True, 0.5), (False, 1e-3)])
@pytest.mark.parametrize(
    ("settings", "devices"),
    [
        ({"offload": "optimizer", "precision": "bf16"}, ["cpu"]),
        ({"offload": "optimizer"}, ["cpu"]),
        ({"offload": {"name": "optimizer", "inner": {"name": "cpu", "pin_memory": False}}}, ["cpu"]),
        ({"offload": {"name": "partial", "units": "[0-2]", "inner": "optimizer"}}, ["cpu", "cuda"]),
        ({"offload": "optimizer", "strategy": "no_shard"}, ["cpu"]),
    ],
    ids=str,
)
def test_steps_in_backward_equal_those_of_the_unsharded_model(
    settings: dict[str, Any], devices: list[str], flat: bool, most: float | None
) -> None:
    for off, found in run(train_in_backward, settings, flat, most):
        # The unsharded model computes in fp32 where this one does in bf16.
        assert off <= (0.1 if "precision" in settings else 1e-10)
        assert found == devices
