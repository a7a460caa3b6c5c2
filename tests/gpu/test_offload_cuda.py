"""CPU offload under a CUDA device: pinned memory, asynchronous copies, and the orders that they need."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from polyshard.interfaces import PluginContext, UnitSpec
from polyshard_plugins.offload import CpuOffload
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
