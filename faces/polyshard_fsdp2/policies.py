"""Settings of ``fully_shard``, with the names and defaults of ``torch.distributed.fsdp``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from polyshard.errors import ConfigError
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes one ``fully_shard`` call's module computes and reduces."""

    param_dtype: torch.dtype | None = None
    """Of whole parameters, and so of compute and of gathers; None for the parameters' own."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients add up over ranks and microbatches. None for ``param_dtype`` and, from torch 2.15 on, for the
    parameters' own."""
    output_dtype: torch.dtype | None = None
    """Of floating-point outputs of the module's forward; None leaves them alone."""
    cast_forward_inputs: bool = True
    """Whether floating-point inputs of the module's forward are cast to ``param_dtype``."""
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    """Answers the ``param_dtype`` of single parameters, as in torch 2.15: their own, or None for that above. Inputs are
    cast to that above. All ranks answer the same."""


@dataclass
class OffloadPolicy:
    """Nothing is offloaded; the base of what is."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and so the optimizer live in host memory."""

    pin_memory: bool = True
    """Whether that memory is page-locked, where the mesh is of CUDA devices."""


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
