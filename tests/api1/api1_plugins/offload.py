import os
import tempfile
from pathlib import Path

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec


class DiskOffload(OffloadManager):
    api_version = 1
    capabilities = OffloadCapabilities(parks=True)
    local_options = frozenset({"folder"})  # each rank may have its own

    def __init__(self, context: PluginContext, folder: str) -> None:
        if not Path(folder).is_dir():
            raise ConfigError(f"folder of offload {context.name!r} is {folder!r}, which is not there; make it first")
        self._folder = folder

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        if not shard.numel():
            return shard.cpu()
        handle, path = tempfile.mkstemp(suffix=".master", dir=self._folder)
        os.close(handle)
        return torch.from_file(path, shared=True, size=shard.numel(), dtype=shard.dtype).copy_(shard)

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad.cpu() if into is None else into.add_(grad.cpu())
