"""DDP, whole parameters, and the comparison of FSDP's with DDP's."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import clean_tensor_name
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_parity.models import CUDAInitMode, FSDPInitMode, TransformerWithSharedParams
from fsdp_parity.ranks import Ranks


def ddp(ranks: Ranks, model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    """``model``, which is on the rank's device, averaged by torch's own DDP."""
    with warnings.catch_warnings():
        # torch 2.13 has another name for it, which earlier versions do not know.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(model, device_ids=None if ranks.on_cpu else [ranks.device], **kwargs)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's whole parameters."""
    with FSDP.summon_full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_parameters(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Two models' parameters have the same names, wrappers aside, and the same values on the same device."""
    assert [clean_tensor_name(name) for name in got] == list(wanted)
    for mine, (name, theirs) in zip(got.values(), wanted.items(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=f"FSDP did not match DDP: {name}: {{}}".format)


def plain_transformer(ranks: Ranks) -> TransformerWithSharedParams:
    model: TransformerWithSharedParams = TransformerWithSharedParams.init(
        ranks.group, FSDPInitMode.NO_FSDP, CUDAInitMode.CUDA_BEFORE, deterministic=True, device=ranks.device
    )
    return model
