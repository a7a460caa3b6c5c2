"""The mean of a few long rows in one pass over memory, as a Triton kernel.

torch's reduction over a short first dimension reaches half to three quarters of the memory's bandwidth (H200, 2 to 8
rows of bf16); this one all of it. The time counts twice: it is taken from computation that runs beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _mean(rows, out, numel, factor, world_size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    # 64-bit: the last row may start beyond 2**31 elements.
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    total = tl.zeros([block], tl.float32)
    for row in tl.static_range(world_size):
        total += tl.load(rows + row * numel + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, total * factor, mask=inside)


def mean_of_rows(out: torch.Tensor, rows: torch.Tensor) -> None:
    """``out = rows.mean(0)``.

    ``rows``: ``[world_size, n]``, contiguous, narrower than fp32; ``out``: ``[n]``, fp32. On the current device.
    """
    world_size, numel = rows.shape
    _mean[(triton.cdiv(numel, _BLOCK),)](rows, out, numel, 1.0 / world_size, world_size, _BLOCK)
