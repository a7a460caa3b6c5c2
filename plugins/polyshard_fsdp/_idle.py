"""Units that a forward used and a backward did not reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from polyshard.runtime.unit import Unit
from torch import nn


class IdleUnit:
    """One rank's part in the reduction of a unit for which it has no gradient.

    Other ranks may have one, so this rank reduces with them, and its part is zero. Where no rank has one, ``.grad`` is
    to be None, as an optimizer does not leave zeros alone. A reduction that tells both apart needs no further message:
    the part is *negative* zero, which adds to nothing, and whose sums are negative zeros exactly where no other number
    was added.
    """

    def __init__(self, unit: Unit) -> None:
        for leaf in unit.leaves:
            if leaf.requires_grad:
                leaf.grad = torch.full_like(leaf, -0.0, requires_grad=False)
        self._fresh: Sequence[nn.Parameter] = [
            parameter for parameter in unit.originals.tensors if parameter.grad is None
        ]
        # A flat parameter ends in padding, into which no rank puts its gradients.
        self._used = max((piece.shard_offset + piece.numel for piece in unit.pieces), default=0)

    def settle(self) -> None:
        """The reduction is done: drop gradients to which no rank gave anything."""
        reduced = [(parameter, parameter.grad) for parameter in self._fresh if parameter.grad is not None]
        if all(_is_negative_zero(gradient.reshape(-1)[: self._used]) for _, gradient in reduced):
            for parameter, _ in reduced:
                parameter.grad = None


def _is_negative_zero(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) & torch.signbit(tensor)).all())
