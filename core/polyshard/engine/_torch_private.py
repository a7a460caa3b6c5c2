"""Every private torch name that the engine uses, with the reason. Run on torch 2.11 and 2.13 by the test suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether the calling thread is executing a backward.

    Activation checkpointing runs forwards inside backward; no public call tells that from a forward after a backward
    that raised.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current backward has ended, on the thread that called it.

    No public hook fires once per backward after all gradients have been accumulated.
    """
    Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined,no-untyped-call]


def foreach_copy_(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination by one fused launch, casting on the way."""
    torch._foreach_copy_(destinations, sources)


def foreach_add_(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Add each source to its destination by one fused launch."""
    torch._foreach_add_(destinations, sources)


def foreach_zero_(tensors: Sequence[torch.Tensor]) -> None:
    """Zero all tensors by one fused launch."""
    torch._foreach_zero_(tensors)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by a scalar tensor by one fused launch, without reading it on the host."""
    torch._foreach_mul_(tensors, factor)


def foreach_norm(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The vector norm of each tensor, by one fused launch, accumulated in ``dtype``."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def tensor_hooks(parameter: torch.Tensor) -> int:
    """Number of hooks that ``Tensor.register_hook`` put on ``parameter``."""
    return len(parameter._backward_hooks or ())


def post_accumulate_grad_hooks(parameter: torch.Tensor) -> Sequence[Callable[[torch.Tensor], Any]]:
    """The hooks that ``register_post_accumulate_grad_hook`` put on ``parameter``; they do not fire by themselves there."""
    hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    return tuple(hooks.values()) if hooks else ()


def default_store() -> Any | None:
    """The store of the default process group, through which ranks can talk before any communicator exists."""
    from torch.distributed import distributed_c10d

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return distributed_c10d._get_default_store()
