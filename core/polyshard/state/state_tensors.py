"""Where an optimizer keeps a tensor of its state, and whether one that it has may be filled in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch

from ..errors import ConfigError
from .source import Source


def fits(present: Any, shape: Iterable[int], dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    """Whether ``present`` is a tensor of this shape and dtype."""
    return isinstance(present, torch.Tensor) and tuple(present.shape) == tuple(shape) and present.dtype == dtype


def kept_beside(group: Mapping[str, Any]) -> bool:
    """Whether 0-dim state lies on the parameter's device.

    As torch's optimizers place it: on the CPU, unless a kernel reads it.
    """
    return bool(group.get("capturable")) or bool(group.get("fused"))


def require_dtype(present: Any, dtype: torch.dtype, what: str, source: Source, where: str) -> None:
    """Raise ConfigError where the optimizer has ``present`` in another dtype than the source."""
    if isinstance(present, torch.Tensor) and present.dtype != dtype:
        raise ConfigError(
            f"{what} is {dtype} in {source.described} but {present.dtype} in the optimizer {where}. Load it "
            "into an optimizer of the dtypes that it was saved from."
        )
