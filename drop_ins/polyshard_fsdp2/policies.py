"""Settings of ``fully_shard``: those of ``torch.distributed.fsdp``, with what its older versions lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed.fsdp as torch_fsdp
from polyshard.errors import ConfigError
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """In which dtypes one ``fully_shard`` call's module computes and reduces: torch's, with a field of torch 2.15."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    """Answers the ``param_dtype`` of single parameters: their own, or None for that of the policy. Inputs are cast to
    that of the policy. All ranks answer the same."""


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a mesh of several parallelisms are for data."""

    shard: str | tuple[str, ...] | None = None
    """Names of the dimensions to shard over; several count as one."""
    replicate: str | tuple[str, ...] | None = None
    """Names of the dimensions to replicate over."""

    def __post_init__(self) -> None:
        """Raise ConfigError: both are None."""
        if self.shard is None and self.replicate is None:
            raise ConfigError(
                "At least one of shard or replicate must be set in DataParallelMeshDims. Name a dimension of the mesh."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)
