"""The settings of ``FullyShardedDataParallel``: torch's own classes, whichever package a script imports them from."""

from __future__ import annotations

from torch.distributed.fsdp import OptimStateKeyType, api
from torch.distributed.fsdp.api import *  # noqa: F403

__all__ = ["OptimStateKeyType"]
__all__ += api.__all__
