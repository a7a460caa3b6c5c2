"""Keeps masters in files that are mapped into memory, and gradients in host memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec


class Disk(OffloadManager):
    """Offloads every unit to a file of its own in ``folder``; the system's folder for temporary files by default."""

    api_version = 1
    capabilities = OffloadCapabilities(offloads=True)
    local_options = frozenset({"folder"})  # each rank may have its own

    def __init__(self, context: PluginContext, folder: str | None = None) -> None:
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        if not self._folder.is_dir():
            raise ConfigError(f"folder of offload {context.name!r} is {folder!r}, which is not there; make it first")

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        if not shard.numel():
            return shard.cpu()
        handle, path = tempfile.mkstemp(suffix=".master", dir=self._folder)
        os.close(handle)
        try:
            return torch.from_file(path, shared=True, size=shard.numel(), dtype=shard.dtype).copy_(shard)
        finally:
            os.unlink(path)  # what is mapped stays until the tensor goes: nothing is left behind, not by a crash either

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.cpu() if into is None else into.add_(grad.cpu())
