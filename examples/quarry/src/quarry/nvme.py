"""Keeps masters and gradients in files of a fast disk, which are mapped into memory."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec


class _Owed(NamedTuple):
    """A gradient on its way to the host, and what becomes of it there."""

    into: torch.Tensor
    adds: bool
    arriving: torch.Tensor
    arrived: torch.Event | None
    """None: it is there."""


class Nvme(OffloadManager):
    """Offloads units whose shard has ``min_nbytes`` or more; smaller ones cost a read more than the memory they free.

    Host memory is a cache of the files, which the kernel empties where other programs need it. A file's blocks are
    reserved when it is made: a full disk is an error then, and no SIGBUS of a later write. Files have no name any more
    when a tensor maps them, so that nothing is left behind, not by a crash either.

    The state of an optimizer is its own, in host memory.
    """

    api_version = 1
    capabilities = OffloadCapabilities(offloads=True)
    local_options = frozenset({"folder"})  # each host mounts its disk where it likes

    def __init__(self, context: PluginContext, folder: str, min_nbytes: int = 2**20) -> None:
        """``folder`` has no default: the one of temporary files is often in memory."""
        where = f"of offload {context.name!r}"
        if not Path(folder).is_dir():
            raise ConfigError(f"folder {where} is {folder!r}, which is not there; make it first")
        if min_nbytes < 0:
            raise ConfigError(f"min_nbytes {where} must be 0 or more, not {min_nbytes}")
        self._folder, self._min_nbytes, self._where = folder, min_nbytes, where
        self._owed: deque[_Owed] = deque()

    def units_to_offload(self, units: Sequence[UnitSpec]) -> Collection[UnitSpec]:
        return [unit for unit in units if unit.shard_numel * unit.master_dtype.itemsize >= self._min_nbytes]

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self._mapped(unit, shard).copy_(shard)

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        # CUDA has read memory that is not page-locked when this returns: later writes to the master are safe.
        own_slice.copy_(master, non_blocking=True)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        on_cuda = grad.device.type == "cuda"
        arriving = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=on_cuda).copy_(grad, non_blocking=True)
        arrived = None
        if on_cuda:
            arrived = torch.Event(device=grad.device)
            arrived.record()
        # A file of its own each time: `.grad` of an earlier step may still be held somewhere.
        target = self._mapped(unit, grad) if into is None else into
        self._owed.append(_Owed(target, into is not None, arriving, arrived))
        self._settle(waits=False)
        return target

    def sync_for_step(self) -> None:
        self._settle(waits=True)

    @torch.no_grad()
    def _settle(self, *, waits: bool) -> None:
        """Write gradients that have arrived, in the order in which they were sent; ``waits``: all of them."""
        while self._owed:
            into, adds, arriving, arrived = self._owed[0]
            if arrived is not None and not arrived.query():
                if not waits:
                    return
                arrived.synchronize()
            into.add_(arriving) if adds else into.copy_(arriving)
            self._owed.popleft()

    def _mapped(self, unit: UnitSpec, like: torch.Tensor) -> torch.Tensor:
        """Memory of ``like``'s shape and dtype that maps a file of its own."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        handle, path = tempfile.mkstemp(dir=self._folder)
        try:
            os.posix_fallocate(handle, 0, like.nbytes)
            return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)
        except OSError as error:
            raise ConfigError(
                f"{unit.label} needs {like.nbytes:,} bytes of folder {self._folder!r} {self._where}: {error}. Name a "
                "folder of a disk with room, or raise min_nbytes."
            ) from error
        finally:
            os.close(handle)
            os.unlink(path)
