"""Rows as codes of fp8 with a scale each, by one Triton kernel: the bits of ``fp8_linear``'s plain operations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .block_codec import SMALLEST_SCALE
from .block_kernels import fp8_codes

#: Elements of a row that are read at once.
_TILE = 1024

_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(shard, codes, scales, columns, reciprocal: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    first = row.to(tl.int64) * columns
    largest = tl.zeros((tile,), dtype=tl.int32)
    for start in range(0, columns, tile):
        offsets = start + tl.arange(0, tile)
        values = tl.load(shard + first + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
        # Magnitudes as integers are in the same order, with infinity and every NaN above them: a maximum loses none.
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.max(largest, 0)
    finite = most < 0x7F800000
    scale = tl.maximum(tl.where(finite, most, 0).to(tl.float32, bitcast=True) * reciprocal, _SMALLEST)
    # Read again, from the cache.
    for start in range(0, columns, tile):
        offsets = start + tl.arange(0, tile)
        values = tl.load(shard + first + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
        quotients = tl.div_rn(values, tl.zeros((tile,), dtype=tl.float32) + scale)
        bits = tl.where(finite, fp8_codes(quotients), 0)
        tl.store(codes + first + offsets, bits.to(tl.uint8), mask=offsets < columns)
    tl.store(scales + row, tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True))


def encode(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, reciprocal: float) -> None:
    """Write the codes (``[n, m]``, uint8) and scales (``[n]``, fp32) of ``rows`` (``[n, m]``, floating-point), all of
    them contiguous."""
    number, columns = rows.shape
    # Triton launches on the current device.
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _encode[(number,)](rows, codes, scales, columns, reciprocal, _TILE, num_warps=4)
