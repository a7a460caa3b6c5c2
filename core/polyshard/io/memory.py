"""Tensors as bytes, a copy of many in host memory, and the dtypes that files can hold by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

#: Bytes that are copied from a device at once. A power of two: torch keeps pinned memory in such sizes.
SEGMENT = 64 << 20


def memory_of_machine() -> int:
    """Bytes of memory and swap; where the system does not say so, more than anybody has."""
    with suppress(OSError), open("/proc/meminfo") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("MemTotal:", "SwapTotal:")))
    return sys.maxsize


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in row-major order as ``uint8``, shape ``[nbytes]``; a view where they lie so."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Not ``view(-1)``: of a single element that keeps whatever stride it had.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


def view_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor of ``uint8`` on the host, shape ``[nbytes]``."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def pieces_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, through host memory where it is on a device."""
    flat = flat_bytes(tensor)
    if flat.device.type == "cpu":
        yield view_of(flat)
        return
    for start in range(0, flat.numel(), SEGMENT):
        part = flat[start : start + SEGMENT]
        yield view_of(torch.empty(part.shape, dtype=torch.uint8, pin_memory=part.is_cuda).copy_(part))


class HostCopy:
    """The file of one rank in host memory, before it is written; pinned where tensors are on CUDA devices."""

    def __init__(self, tensors: Sequence[torch.Tensor], starts: Sequence[int], size: int) -> None:
        """Copy. ``starts``: the first byte of each tensor, in order; ``size``: of all, in bytes."""
        pinned = any(tensor.is_cuda for tensor in tensors)
        self._segments = [
            torch.empty(min(SEGMENT, size - start), dtype=torch.uint8, pin_memory=pinned)
            for start in range(0, size, SEGMENT)
        ]
        end = 0
        for tensor, start in zip(tensors, starts, strict=True):
            flat = flat_bytes(tensor)
            # What memory held before is nobody's to read from a file.
            for gap in self._between(end, start):
                gap.zero_()
            done = 0
            for place in self._between(start, start + flat.numel()):
                place.copy_(flat[done : done + place.numel()], non_blocking=True)
                done += place.numel()
            end = start + flat.numel()
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def pieces(self) -> Iterator[memoryview]:
        for segment in self._segments:
            yield view_of(segment)

    def _between(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        while start < stop:
            number, offset = divmod(start, SEGMENT)
            place = self._segments[number][offset : offset + stop - start]
            yield place
            start += place.numel()


#: By the name in a manifest; with it the name in safetensors files, where their format has one.
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": None,
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": None,
    "float8_e8m0fnu": None,
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": None,
}
#: A name in a file is looked up here, never in a module.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
#: Dtypes that numpy has, in the same bytes.
NUMPY = frozenset(name for name in _NAMES if name != "bfloat16" and not name.startswith("float8"))
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {other: DTYPES[name] for name, other in _NAMES.items() if other}
SAFETENSORS_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
