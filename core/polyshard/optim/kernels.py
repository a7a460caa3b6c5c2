"""Muon's passes over memory and products as Triton kernels.

The momentum and the step read and write each element once, and compute in fp32. Of ``A A^T`` one half is the other:
blocks below the diagonal are computed and written twice, which takes 0.55 to 0.85 of the time of cuBLAS's whole product
on an H200, with the same bits (benchmarks/figures-parts.md, "Muon").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _mix(mean, gradient, place, numel, momentum, nesterov: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    old = tl.load(mean + offsets, mask=inside, other=0.0)
    new = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    moved = old + (1 - momentum) * (new - old)
    tl.store(mean + offsets, moved, mask=inside)
    mixed = moved + (1 - momentum) * (new - moved) if nesterov else moved
    tl.store(place + offsets, mixed.to(place.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _go_along(parameter, direction, numel, keep, step, block: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offsets < numel
    old = tl.load(parameter + offsets, mask=inside, other=0.0)
    along = tl.load(direction + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(parameter + offsets, old * keep + step * along, mask=inside)


def mix(mean: torch.Tensor, gradient: torch.Tensor, place: torch.Tensor, momentum: float, nesterov: bool) -> None:
    """``momentum.mix`` of one of each; ``mean`` in fp32, all contiguous."""
    numel = mean.numel()
    _mix[(triton.cdiv(numel, _BLOCK),)](mean, gradient, place, numel, momentum, nesterov, _BLOCK)


def go_along(parameter: torch.Tensor, direction: torch.Tensor, keep: float, step: float) -> None:
    """``parameter <- keep * parameter + step * direction``; ``parameter`` in fp32, both contiguous."""
    numel = parameter.numel()
    _go_along[(triton.cdiv(numel, _BLOCK),)](parameter, direction, numel, keep, step, _BLOCK)


#: Rows and columns of a block, and the columns of ``A`` that are read at a time.
_ROWS, _DEPTH = 128, 64


@triton.jit  # type: ignore[untyped-decorator]
def _half(  # type: ignore[no-untyped-def]
    a,
    added,
    out,
    rows,
    columns,
    stride_matrix,
    stride_row,
    stride_column,
    alpha,
    beta,
    diagonal,
    adds: tl.constexpr,
    block: tl.constexpr,
    depth: tl.constexpr,
):
    # Blocks of the lower triangle, row by row. The root is of a float: it may be off by one.
    number = tl.program_id(0)
    i = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)
    j = number - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    down = i * block + tl.arange(0, block)
    across = j * block + tl.arange(0, block)
    inner = tl.arange(0, depth)
    # What lies outside is read from inside and never written.
    left = (
        a + matrix * stride_matrix + (down % rows)[:, None].to(tl.int64) * stride_row + inner[None, :] * stride_column
    )
    right = (
        a + matrix * stride_matrix + (across % rows)[None, :].to(tl.int64) * stride_row + inner[:, None] * stride_column
    )
    total = tl.zeros((block, block), dtype=tl.float32)
    for step in range(tl.cdiv(columns, depth)):
        left_part = tl.load(left, mask=inner[None, :] < columns - step * depth, other=0.0)
        right_part = tl.load(right, mask=inner[:, None] < columns - step * depth, other=0.0)
        total = tl.dot(left_part, right_part, total)
        left += depth * stride_column
        right += depth * stride_column
    total = total * alpha
    inside = (down[:, None] < rows) & (across[None, :] < rows)
    place = matrix * rows * rows + down[:, None].to(tl.int64) * rows + across[None, :]
    if adds:
        total += beta * tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(down[:, None] == across[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=inside)
    if i != j:
        mirrored = matrix * rows * rows + across[:, None].to(tl.int64) * rows + down[None, :]
        tl.store(out + mirrored, tl.trans(result), mask=(across[:, None] < rows) & (down[None, :] < rows))


def gram(matrices: torch.Tensor) -> torch.Tensor:
    """``A A^T`` of each of ``matrices``, ``[count, rows, columns]`` in bf16 or fp16; ``[count, rows, rows]``."""
    return _launch(matrices, None, 1.0, 0.0, 0.0)


def quadratic(symmetric: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """``a I + b S + c S S`` of each of ``symmetric`` (``[count, rows, rows]``, bf16 or fp16), rounded once."""
    return _launch(symmetric, symmetric, c, b, a)


def _launch(
    matrices: torch.Tensor, added: torch.Tensor | None, alpha: float, beta: float, diagonal: float
) -> torch.Tensor:
    count, rows, columns = matrices.shape
    out = torch.empty(count, rows, rows, dtype=matrices.dtype, device=matrices.device)
    side = triton.cdiv(rows, _ROWS)
    _half[(side * (side + 1) // 2, count)](
        matrices,
        out if added is None else added,
        out,
        rows,
        columns,
        *matrices.stride(),
        alpha,
        beta,
        diagonal,
        added is not None,
        _ROWS,
        _DEPTH,
        num_warps=4,
        # Tried on an H200: long rows leave more to be fetched ahead.
        num_stages=4 if columns > 2 * rows else 3,
    )
    return out
