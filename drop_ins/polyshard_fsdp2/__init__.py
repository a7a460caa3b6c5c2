"""``torch.distributed.fsdp.fully_shard`` over polyshard's engine.

A program that uses it moves over by changing the line that imports it.
"""

from __future__ import annotations

from ._fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from ._install import install
from .fsdp_module import FSDPModule, GradientReductionHandle, UnshardHandle
from .policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "install",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
