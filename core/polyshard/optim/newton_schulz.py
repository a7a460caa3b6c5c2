"""Orthogonal factors of matrices by Newton-Schulz iterations, as Muon wants them."""

from __future__ import annotations

import torch

#: Of the quintic that Muon's authors tuned for its slope at zero (Jordan et al. 2024, "Muon: An optimizer for hidden
#: layers in neural networks"); torch.optim.Muon has the same.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    matrices: torch.Tensor, steps: int = 5, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7
) -> torch.Tensor:
    """``U S' V^T`` of each matrix ``U S V^T``, with all of ``S'`` near 1 (between about 0.7 and 1.2 after five steps).

    With ``X`` the matrix over its Frobenius norm, the shorter side first, each step is ``X <- a X + (b A + c A A) X``
    where ``A = X X^T``. That is torch.optim.Muon's iteration. Torch's function for it is private and takes one matrix
    in bf16; this one takes many of one shape at once, in any dtype.

    Args:
        matrices: ``[count, rows, columns]``, computed with in their own dtype; left as they are.
        steps: iterations.
        coefficients: ``a, b, c``.
        eps: smallest norm that a matrix is divided by.
    """
    a, b, c = coefficients
    wide = matrices.size(-2) <= matrices.size(-1)
    x = matrices if wide else matrices.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x if wide else x.mT


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> float:
    """Floating-point operations of one matrix's iterations: three products a step."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short * short * long + 2.0 * short**3)
