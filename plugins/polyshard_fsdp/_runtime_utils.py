"""The turning points of a step, as functions that are looked up when they are called: tests stand in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from polyshard.engine import _torch_private
from polyshard.engine.step.backward import output_hook
from polyshard.engine.step.boundary import pass_through_in
from polyshard.engine.tensors import distinct_tensors, iter_hidden_tensors, map_tensors
from torch import nn

from ._common_utils import HandleTrainingState

if TYPE_CHECKING:
    from ._flat_param import FlatParamHandle
    from ._state import FSDPInstance

#: Attributes in which all instances under one root must agree.
HOMOGENEOUS_ATTR_NAMES = ["_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"]


def _unshard(state: FSDPInstance, handle: FlatParamHandle) -> None:
    """Issue the gather of ``handle``'s flat parameter."""
    assert handle.unit is not None
    handle.unit.gather()


def _reshard(state: FSDPInstance, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    """Let modules see shards again, and release the gathered flat parameter where that is asked for."""
    assert handle.unit is not None
    if free_unsharded_flat_param:
        handle.unit.release()
    else:
        handle.unit.conceal()


def _post_backward_reshard(state: FSDPInstance, handle: FlatParamHandle) -> None:
    """Let go of ``handle``'s whole parameters at the end of its backward."""
    assert handle.unit is not None
    handle.unit.let_go()


def _get_handle_to_prefetch(state: FSDPInstance, current_handle: FlatParamHandle) -> FlatParamHandle | None:
    """The handle whose gather comes next after ``current_handle``'s in this backward; None for nothing to prefetch."""
    upcoming = state._stage.upcoming()
    return upcoming.instance._handle if upcoming is not None else None


def _get_training_state(handle: FlatParamHandle | None) -> HandleTrainingState:
    """Where in its step ``handle`` is; idle without one."""
    return handle._training_state if handle is not None else HandleTrainingState.IDLE


def _register_pre_backward_hooks(
    state: FSDPInstance, module: nn.Module, outputs: Any, handle: FlatParamHandle | None
) -> Any:
    """``outputs``, each of which starts the instance's backward before a gradient goes through it."""
    hook = output_hook(state._stage)
    for tensor in iter_hidden_tensors(outputs):
        if tensor.grad_fn is not None:
            _torch_private.on_gradient(tensor, hook)
    found = distinct_tensors(outputs, lambda tensor: tensor.grad_fn is not None)
    if any(tensor._is_view() for tensor in found):
        # An in-place change of a view rewrites its history, and a hook on it would be lost: hang it on what is none.
        outputs = pass_through_in(_nothing, outputs, found)
        found = distinct_tensors(outputs, lambda tensor: tensor.grad_fn is not None)
    for tensor in found:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return outputs


def _nothing() -> None:
    """Called when a gradient passes."""


def _register_post_backward_hook(state: FSDPInstance, handle: FlatParamHandle | None) -> None:
    """Let the instance's backward end once the gradients of its inputs are there."""
    state._forward.watch_pending_inputs()


def _move_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """A forward's inputs with every tensor on ``device``."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == device else tensor.to(device)

    return map_tensors(move, (args, kwargs))


def _cast_forward_inputs(dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A forward's inputs with every floating-point tensor in ``dtype``; unchanged for None."""
    if dtype is None:
        return args, kwargs

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, (args, kwargs))
