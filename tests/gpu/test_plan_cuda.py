"""That plans hold on a device: the peak of a real step beside the planned one; CPU twin: ``tools/test_plan.py``."""

from __future__ import annotations

import gc
import os
import warnings
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from polyshard import ShardConfig
from polyshard.interfaces import PluginContext
from polyshard_backends.nccl import NcclCollectives
from polyshard_tools.doctor.machine import read_machine
from polyshard_tools.doctor.trial import TrialState, run_trial, trials_for
from polyshard_tools.forecast import ShapedBatches, find_device, fitted, plan
from polyshard_tools.forecast.bench import bench
from processes import KeptRanks, device_of, gpu_ranks, run_processes, share_device
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()

RANKS = KeptRanks("nccl")

run = partial(RANKS.run, WORLD_SIZE)

WIDTH, DEPTH, ROWS = 2048, 6, 4096


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.down(nn.functional.silu(self.up(self.norm(x))))
        return mixed


class Tower(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x.float().square().mean()


SETTINGS: dict[str, Any] = {"precision": "bf16", "policy": {"name": "module_class", "classes": Layer}}


def peak_of_a_step(rank: int, recomputes: bool, settings: dict[str, Any]) -> int:
    """Most bytes of tensors on the device in the third step, and the workspaces that the first two left."""
    device = device_of(rank)
    # An earlier model, whose objects hold each other, would end in this one's step.
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    with torch.device("meta"):
        model = Tower(recomputes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        polyshard.shard(model, ShardConfig(device=device, **SETTINGS, **settings))
    optimizer = torch.optim.AdamW(polyshard.flat_parameters(model), fused=True)
    x = torch.zeros(ROWS, WIDTH, device=device)
    for turn in range(3):
        if turn == 2:
            torch.cuda.reset_peak_memory_stats(device)
        with warnings.catch_warnings():
            # Of one device alone, which may have no multicast.
            warnings.filterwarnings("ignore", message=".*registering it failed")
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    polyshard.close(model)
    return peak


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_peak_of_a_step_is_the_planned_one(recomputes: bool) -> None:
    measured = run(peak_of_a_step, recomputes, {})
    with torch.device("meta"):
        model = Tower(recomputes)
    batch = ShapedBatches.parse(f"float32[{ROWS},{WIDTH}]")
    found = plan(ShardConfig(**SETTINGS), model, WORLD_SIZE, batch=batch, samples=ROWS, device=find_device("h200"))
    # What the process held before may contain the workspaces: 64 MiB of some 1.5 GiB.
    assert measured == [pytest.approx(found.peak_nbytes, rel=0.05)] * len(measured)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "full_shard", "hybrid", "hfsdp", "hpz"])
def test_the_peak_of_each_strategy_is_the_planned_one(strategy: str) -> None:
    """Of rank 0 of eight pretended ones."""
    chosen: dict[str, Any] = {"strategy": strategy}
    if strategy in ("hybrid", "hfsdp", "hpz"):
        chosen["shard_size"] = 4
    with torch.device("meta"):
        model = Tower(recomputes=True)
    batch = ShapedBatches.parse(f"float32[{ROWS},{WIDTH}]")
    found = plan(ShardConfig(**SETTINGS, **chosen), model, 8, batch=batch, samples=ROWS, device=find_device("h200"))
    chosen["collectives"] = {"name": "fake", "world_size": 8}
    # A new process, in which no earlier model left a workspace.
    assert run_processes(1, peak_of_a_step, True, chosen) == [pytest.approx(found.peak_nbytes, rel=0.02)]


def measured_links(rank: int) -> list[float]:
    collectives = NcclCollectives(PluginContext("nccl", device_of(rank)))
    timings = bench(collectives, (2**22, 2**26, 2**28), rounds=5)
    return [
        fitted(
            operation, collectives.world_size, [(t.nbytes, t.seconds) for t in timings if t.operation is operation]
        ).bandwidth
        for operation in dict.fromkeys(t.operation for t in timings)
    ]


@pytest.mark.skipif(WORLD_SIZE < 2, reason="needs two GPUs")
def test_all_ranks_measure_the_same_links() -> None:
    first, second = run(measured_links)
    assert first == pytest.approx(second, rel=1e-12)
    # Between a slow host's memory, or sockets where ranks share a device, and what links of today carry.
    least = 1e8 if share_device() else 1e9
    assert all(least < bandwidth < 2e12 for bandwidth in first)


def test_devices_are_those_of_torch() -> None:
    machine = read_machine(dict(os.environ))
    assert [device.name for device in machine.devices] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    for index, device in enumerate(machine.devices):
        assert device.total_nbytes == torch.cuda.mem_get_info(index)[1]
        assert 0 < device.free_nbytes <= device.total_nbytes
        assert index not in device.peers
    assert machine.nccl is not None
    assert machine.nvidia_devices >= len(machine.devices)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.timeout(240)
def test_all_devices_train_over_nccl_as_an_unsharded_model_does() -> None:
    machine = read_machine(dict(os.environ))
    trial = next(each for each in trials_for(machine) if each.backend == "nccl")
    assert trial.world_size == torch.cuda.device_count()
    outcome = run_trial(trial, os.environ, limit_s=200.0)
    assert outcome.state is TrialState.EQUAL, outcome
