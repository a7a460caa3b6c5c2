"""Identity functions at a unit's entry and exit, whose backwards tell the unit where a backward stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..tensors import map_tensors

T = TypeVar("T")


class Boundary(torch.autograd.Function):
    """Passes tensors through and calls ``callback`` in backward, before passing their gradients on.

    On a unit's inputs it runs once everything on the way to them has its gradient: autograd executes ready nodes in
    the reverse order of their creation, and this node was created before any of the unit's own. On an output it runs
    before any of the unit's nodes, and, unlike a tensor hook, survives in-place changes of an output that is a view.
    """

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``tensors`` as new tensors over the same memory: an in-place first operation on an input itself raises."""
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Call back, then pass every gradient on."""
        ctx.callback()
        return (None, *gradients)


def pass_through(callback: Callable[[], None], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``tensors``, with ``callback`` called in backward before their gradients leave."""
    passed: tuple[torch.Tensor, ...] = Boundary.apply(callback, *tensors)  # type: ignore[no-untyped-call]
    return passed


def pass_through_in(callback: Callable[[], None], value: T, tensors: list[torch.Tensor]) -> T:
    """``value`` with ``tensors``, which are distinct, passed through: each is one tensor still wherever it occurs."""
    passed = dict(zip(map(id, tensors), pass_through(callback, tensors), strict=True))
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), value)
