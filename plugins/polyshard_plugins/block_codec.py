"""Numbers of eight bits with one scale for every block of elements: the format, and its codec in plain torch.

[Note: the format]
A shard of n elements is cut into blocks of ``block`` elements, the last one shorter. A message has, in this order,

1. n codes, one byte each, padded with zeros to a multiple of 16 bytes;
2. one fp32 scale a block, padded to a multiple of 16 bytes with the smallest scale;
3. from 64 KiB on, zeros up to a multiple of 256 bytes, for which NCCL takes its fast path.

With M the largest code value (127 for int8, 448 for fp8) and a the largest magnitude in a block, its scale is
``s = max(a fl(1/M), 2**-126)``, and element x travels as ``x / s``, rounded to the nearest code, ties to even. It
arrives as ``code s``, computed in fp32 and rounded once to the compute dtype. Every step is one IEEE operation in fp32,
so that CPU, CUDA and ``block_kernels.py`` write and read the same bits.

- The factor is a number, not a division by M: torch divides by numbers in two ways, depending on the device.
- No block has a subnormal scale, which devices may flush to zero. Values below 2**-127 therefore arrive as 0.
- A block with an infinity or a NaN has the scale NaN, and all of it arrives as NaN.
- ``x / s`` may exceed M by rounding, by far less than half a step.
"""

from __future__ import annotations

import enum
import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from polyshard.interfaces import SLICE_ALIGNMENT_BYTES

_ALIGNMENT = 16
#: Bytes from which on a rank's part is a multiple of ``SLICE_ALIGNMENT_BYTES``, as with slices in a dtype.
_LARGE = 64 * 1024
_SCALE = torch.float32
#: The smallest scale: the smallest normal number of fp32.
SMALLEST_SCALE = 2.0**-126


class Number(enum.Enum):
    """The kind of a code."""

    INT8 = "int8"
    """Two's complement, from -127 to 127: equal steps, so the error is the same for all values of a block."""
    FP8 = "fp8"
    """``torch.float8_e4m3fn``, up to 448: 4 bits of exponent and 3 of mantissa, so that the error grows with values."""

    @property
    def largest(self) -> int:
        """The largest value of a code that is used."""
        return 127 if self is Number.INT8 else 448

    @property
    def reciprocal(self) -> float:
        """``1 / largest``, rounded to fp32."""
        # Its digits are those of fp32 already: whoever multiplies by it in fp32 rounds it no further.
        return float.fromhex("0x1.020408p-7" if self is Number.INT8 else "0x1.24924ap-9")

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self is Number.INT8 else torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class BlockCode:
    """Codes of one kind, in blocks of one size."""

    number: Number
    block: int
    """Elements that share a scale."""

    def blocks(self, numel: int) -> int:
        """Scales that ``numel`` elements have."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Bytes that ``numel`` elements take in a message; a multiple of 16."""
        end = self._end(numel)
        return end if end < _LARGE else _padded(end, SLICE_ALIGNMENT_BYTES)

    def encode(self, message: torch.Tensor, shard: torch.Tensor) -> None:
        """Write ``shard`` (``[numel]``, floating-point) into ``message`` (``[nbytes(numel)]``, uint8): all bytes of it.

        fp64 is rounded to fp32 first, so what exceeds that is infinite.
        """
        numel, blocks = shard.numel(), self.blocks(shard.numel())
        payload, scales = self._parts(message, numel)
        whole = numel // self.block * self.block
        rows = payload[:whole].view(-1, self.block)
        encode_rows(self.number, rows, scales[: blocks - (whole < numel)], shard[:whole])
        if whole < numel:
            encode_rows(self.number, payload[whole:numel].view(1, -1), scales[blocks - 1 : blocks], shard[whole:])
        payload[numel:].zero_()
        scales[blocks:].fill_(SMALLEST_SCALE)
        message[self._end(numel) :].zero_()

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Read ``message`` (``[ranks, nbytes(numel)]``, uint8) into ``out`` (``[ranks, numel]``, floating-point)."""
        numel, blocks = out.size(1), self.blocks(out.size(1))
        payload, scales = self._parts(message, numel)
        codes = payload.view(self.number.dtype)
        whole = numel // self.block * self.block
        if whole:
            shape = (out.size(0), -1, self.block)
            _scale(codes[:, :whole].view(shape), scales, out[:, :whole].view(shape))
        if whole < numel:
            _scale(codes[:, None, whole:numel], scales[:, blocks - 1 :], out[:, None, whole:])

    def _end(self, numel: int) -> int:
        return _padded(numel) + _padded(self.blocks(numel) * _SCALE.itemsize)

    def _parts(self, message: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = _padded(numel)
        return message[..., :start], message[..., start : self._end(numel)].view(_SCALE)


def encode_rows(number: Number, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Write codes and a scale each of rows. ``codes``: ``[rows, size]``, uint8; ``scales``: ``[rows]``, fp32.

    ``values``: ``[rows * size]``, floating-point.
    """
    if not values.numel():
        return
    values = values.view_as(codes).to(_SCALE)
    largest = values.abs().amax(1)
    scale = scale_of(number, largest)
    finite = largest < torch.inf
    scales.copy_(torch.where(finite, scale, torch.nan))
    quotients = values / scale.unsqueeze(1)
    # A NaN as an integer, or as a code of fp8, is whatever the device makes of it.
    quotients.masked_fill_(~finite.unsqueeze(1), 0.0)
    codes.view(number.dtype).copy_(quotients.round_() if number is Number.INT8 else quotients)


def scale_of(number: Number, largest: torch.Tensor) -> torch.Tensor:
    """Scales of rows whose largest magnitudes are ``largest``, fp32."""
    # Rounding may take the largest quotient above the largest code, by far less than half a step.
    return (largest * number.reciprocal).clamp_(min=SMALLEST_SCALE)


def kernels_for(tensor: torch.Tensor, name: str) -> ModuleType | None:
    """The module ``name`` of kernels, where ``tensor`` is on CUDA and this build of torch comes with Triton."""
    if not tensor.is_cuda:
        return None
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError:
        return None


def _scale(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """``codes``, ``out``: ``[ranks, blocks, size]``; ``scales``: ``[ranks, blocks or more]``."""
    values = codes.to(_SCALE)
    out.copy_(values.mul_(scales[:, : codes.size(1), None]))


def _padded(nbytes: int, alignment: int = _ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment
