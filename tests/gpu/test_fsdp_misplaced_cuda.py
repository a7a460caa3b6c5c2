"""The drop-in's parameters where they must not be when training begins; CPU twin: ``tests/fsdp/test_fsdp_init.py``."""

from __future__ import annotations

import importlib
import warnings

import polyshard_fsdp
import pytest
import torch
import torch.distributed.fsdp
from polyshard_fsdp import CPUOffload
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp.wrap import ModuleWrapPolicy
from processes import KeptRanks, device_of, gpu_ranks
from torch import nn

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")


def refused(rank: int, use_orig_params: bool, offload: bool) -> tuple[str, bool]:
    """What the first forward says of a model on the wrong side, and whether it trains when it has been moved back."""
    device = torch.device("cuda", torch.cuda.current_device())
    with warnings.catch_warnings():
        # Wrapped on the CPU; with one GPU, not sharded.
        warnings.simplefilter("ignore")
        model = FSDP(
            nn.Linear(3, 2),
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offload),
        )
    x = torch.ones(4, 3, device=device)
    if offload:
        model.to(device)
    with pytest.raises(RuntimeError) as error:
        model(x)
    model.to("cpu" if offload else device)
    model(x).sum().backward()
    # A rank without a part of a parameter has no gradient of it.
    held = [p for p in model.parameters() if p.numel()]
    return str(error.value), all(p.grad is not None and p.grad.device == p.device for p in held)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_on_the_cpu(use_orig_params: bool) -> None:
    for rank, (said, trained) in enumerate(RANKS.run(WORLD_SIZE, refused, use_orig_params, False)):
        assert said.startswith(
            "An FSDP-managed module unexpectedly has parameters on cpu. Make sure to move the module to "
            f"{device_of(rank)} before training."
        )
        assert trained


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_on_the_device_although_offloaded(use_orig_params: bool) -> None:
    for rank, (said, trained) in enumerate(RANKS.run(WORLD_SIZE, refused, use_orig_params, True)):
        assert said.startswith(
            "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
            f"{device_of(rank)}. Make sure to not move the module from CPU when offloading parameters."
        )
        assert trained


def offloaded(rank: int, use_orig_params: bool) -> tuple[list[list[float]], int, int]:
    """Losses of torch's wrapper and ours, and of ours the bytes that offloading frees, and those of flat parameters."""
    device = torch.device("cuda", torch.cuda.current_device())
    told, freed, held = [], 0, 0
    for package in (torch.distributed.fsdp, polyshard_fsdp):
        utilities = importlib.import_module(f"{package.__name__}._runtime_utils")
        # Ours finds its root where it is asked.
        lazy_init = getattr(utilities, "_lazy_init", lambda model, _: model._is_root)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            # With one GPU, not sharded.
            warnings.simplefilter("ignore")
            model = package.FullyShardedDataParallel(
                nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 3)).double(),
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_id=device,
                use_orig_params=use_orig_params,
            )
        x = torch.randn(4, 256, dtype=torch.float64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        told.append([])
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told[-1].append(loss.item())
            lazy_init(model, model)
            before = torch.cuda.memory_allocated()
            for where in (torch.device("cpu"), device):
                for handle in model._all_handles:
                    handle.flat_param_to(where, non_blocking=True)
                    handle.flat_param._local_shard = handle.flat_param.data
                if where is not device:
                    freed = before - torch.cuda.memory_allocated()
                    held = sum(handle.flat_param.nbytes for handle in model._all_handles)
    return told, freed, held


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_in_host_memory_between_steps(use_orig_params: bool) -> None:
    for (theirs, ours), freed, held in RANKS.run(WORLD_SIZE, offloaded, use_orig_params):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert freed >= held
