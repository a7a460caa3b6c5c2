"""What the CUDA allocator holds while a peer runs."""

from __future__ import annotations

import gc

import torch

_GIB = 2**30


class Memory:
    """What the CUDA allocator says of one device; None of everything on another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"

    def settle(self) -> None:
        """Give back what nobody uses."""
        gc.collect()
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def reset_peaks(self) -> None:
        """Begin a new period for the peaks."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peaks(self) -> tuple[float, float] | None:
        """Largest allocated and largest reserved GiB since ``reset_peaks``."""
        if not self._cuda:
            return None
        return (
            torch.cuda.max_memory_allocated(self._device) / _GIB,
            torch.cuda.max_memory_reserved(self._device) / _GIB,
        )

    def allocated(self) -> float | None:
        """GiB that tensors take."""
        return torch.cuda.memory_allocated(self._device) / _GIB if self._cuda else None

    def reserved(self) -> float | None:
        """GiB that the allocator holds."""
        return torch.cuda.memory_reserved(self._device) / _GIB if self._cuda else None

    def used(self) -> float | None:
        """GiB in use on the device by anyone: the allocator's, and what NCCL and CUDA take beside it."""
        if not self._cuda:
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return (total - free) / _GIB

    def free(self) -> float | None:
        """GiB of the device that nobody has."""
        return torch.cuda.mem_get_info(self._device)[0] / _GIB if self._cuda else None

    def retries(self) -> int:
        """How often the allocator had to free its cache to serve a request."""
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)) if self._cuda else 0


def larger(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    """The larger of each of two pairs of peaks."""
    if one is None or other is None:
        return None
    return max(one[0], other[0]), max(one[1], other[1])
