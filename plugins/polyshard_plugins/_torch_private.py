"""Private names of torch that the built-in plugins need, looked at in 2.11 to 2.15."""

from __future__ import annotations

from typing import Any

import torch

#: A product of fp8 matrices with scales. Its public form, ``torch.nn.functional.scaled_mm``, has no lowering of its own
#: in the compiler of 2.11, which then lays the second matrix out in backward as its kernels do not take it.
_scaled_mm: Any = torch._scaled_mm


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    fast_accumulation: bool,
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b)``: ``a`` ``[m, k]`` row-major, ``b`` ``[k, n]`` column-major, both fp8 on CUDA;
    ``scale_a`` ``[m, 1]``, ``scale_b`` ``[1, n]``, fp32."""
    product: torch.Tensor = _scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast_accumulation
    )
    return product
