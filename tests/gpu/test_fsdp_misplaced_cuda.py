"""The drop-in's parameters where they must not be when training begins; CPU twin: ``tests/fsdp/test_fsdp_init.py``."""

from __future__ import annotations

import warnings

import pytest
import torch
from polyshard_fsdp import CPUOffload
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
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
