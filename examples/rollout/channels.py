"""From the trainers' rank 0 into the memory of the generator: by shared memory, CUDA handles or a broadcast."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

Weights = Mapping[str, torch.Tensor]
_END, _STOP = "end", "stop"


class Channel(ABC):
    """Two processes: rank 0, which sends, and the generator. Each call of one meets the same call of the other."""

    def __init__(self, generator: int, group: dist.ProcessGroup) -> None:
        """``group``: of the two, for words."""
        self.generator = generator
        self.group = group

    def tell(self, message: Any, sender: int) -> Any:
        """What ``sender`` calls it with, on both."""
        box = [message]
        dist.broadcast_object_list(box, src=sender, group=self.group)
        return box[0]

    def send(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Hand over one list. Returns when the generator has copied it: the tensors may end then."""
        if names:
            self.tell(self._described(names, tensors), 0)
            self._transfer(tensors)

    def end(self, *, of_all: bool = False) -> None:
        """No list is left of this hand-over, or there will be no other hand-over."""
        self.tell(_STOP if of_all else _END, 0)

    def receive(self, weights: Weights) -> bool:
        """Copy the lists of a hand-over into ``weights``; False where there is none any more."""
        while (message := self.tell(None, 0)) not in (_END, _STOP):
            self._copy(message, weights)
        return bool(message == _END)

    @abstractmethod
    def _described(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
        """What the generator needs to know of a list."""

    def _transfer(self, tensors: Sequence[torch.Tensor]) -> None:
        # The generator is behind its copies.
        dist.barrier(self.group)

    @abstractmethod
    def _copy(self, message: Any, weights: Weights) -> None:
        """Copy the list that ``message`` describes; then meet ``_transfer``."""


class SharedMemory(Channel):
    """Host memory that both map: made by the first hand-over, as large as the largest list, and used by all others."""

    _buffer: torch.Tensor | None = None

    def _described(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
        *starts, nbytes = accumulate((-(-each.nbytes // 16) * 16 for each in tensors), initial=0)
        path = None
        if self._buffer is None or self._buffer.numel() < nbytes:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
            handle, path = tempfile.mkstemp(dir=folder)
            os.close(handle)
            self._buffer = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        for start, tensor in zip(starts, tensors, strict=True):
            self._buffer[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        return path, nbytes, list(zip(names, starts, strict=True))

    def _copy(self, message: Any, weights: Weights) -> None:
        path, nbytes, places = message
        if path is not None:
            self._buffer = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
            # Nobody else needs the name.
            Path(path).unlink()
        assert self._buffer is not None
        for name, start in places:
            own = weights[name]
            own.copy_(self._buffer[start : start + own.nbytes].view(own.dtype).view(own.shape))
        dist.barrier(self.group)


class CudaHandles(Channel):
    """The trainer's own device memory, which the generator opens by its handle, and lets go when it has copied."""

    def _described(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
        return [
            (name, *reduce_tensor(tensor))  # type: ignore[no-untyped-call]
            for name, tensor in zip(names, tensors, strict=True)
        ]

    def _transfer(self, tensors: Sequence[torch.Tensor]) -> None:
        super()._transfer(tensors)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _copy(self, message: Any, weights: Weights) -> None:
        for name, rebuild, arguments in message:
            weights[name].copy_(rebuild(*arguments))
        # Copies run behind the host.
        torch.cuda.synchronize()
        dist.barrier(self.group)


class Broadcast(Channel):
    """A process group of the two, which may be on different hosts."""

    def __init__(self, generator: int, group: dist.ProcessGroup, tensors: dist.ProcessGroup) -> None:
        """``tensors``: of the two, over the backend of the device."""
        super().__init__(generator, group)
        self._tensors = tensors

    def _described(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Any:
        return list(names)

    def _transfer(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=self._tensors)

    def _copy(self, message: Any, weights: Weights) -> None:
        for name in message:
            dist.broadcast(weights[name], src=0, group=self._tensors)
