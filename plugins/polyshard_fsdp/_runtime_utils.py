"""The turning points of a step, as functions that are looked up when they are called: tests stand in between."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from polyshard import _torch_private
from polyshard.nested import distinct_tensors, iter_hidden_tensors, map_tensors
from polyshard.runtime.hooks import output_hook, pass_through_in
from polyshard.runtime.module_state import ModuleState
from torch import nn

from ._common_utils import HandleTrainingState
from ._flat_param import FlatParamHandle
from ._idle import IdleUnit
from .api import BackwardPrefetch, MixedPrecision

#: Attributes in which all instances under one root must agree.
HOMOGENEOUS_ATTR_NAMES = ["_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"]


class StepInstance(Protocol):
    """An FSDP instance, as its module state and its unit know it. ``_state.FSDPInstance`` is the one kind."""

    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    compute_device: torch.device
    _is_root: bool | None
    _handle: FlatParamHandle | None

    @property
    def _stage(self) -> ModuleState:
        """Its place in a step."""

    @property
    def _ends_by_hook(self) -> bool:
        """Whether its backward ends where its own gradients do, and not with the whole backward alone."""

    def _upcoming(self) -> FlatParamHandle | None:
        """Whose gather comes next in the backward that runs; None where nothing follows, or nothing is known."""

    def _watch_pending_inputs(self) -> None:
        """Let backward end at the inputs of the forward that is being entered."""

    def _enter_forward(self) -> None:
        """A forward begins: the root is known from now on, and whole parameters outside of compute are refused."""

    def _place_buffers(self) -> None:
        """Move and cast the buffers of every instance under its root, where the mode asks for another dtype."""

    def _leave_idle(self, idle: IdleUnit) -> None:
        """Its unit takes part in this backward's reductions although this rank has no gradient for it."""


def _unshard(state: StepInstance, handle: FlatParamHandle) -> None:
    """Issue the gather of ``handle``'s flat parameter."""
    assert handle.unit is not None
    handle.unit.gather()


def _reshard(state: StepInstance, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    """Let modules see shards again, and release the gathered flat parameter where that is asked for."""
    assert handle.unit is not None
    if free_unsharded_flat_param:
        handle.unit.release()
    else:
        handle.unit.conceal()


def _post_backward_reshard(state: StepInstance, handle: FlatParamHandle) -> None:
    """Let go of ``handle``'s whole parameters at the end of its backward."""
    assert handle.unit is not None
    handle.unit.let_go()


def _get_handle_to_prefetch(state: StepInstance, current_handle: FlatParamHandle) -> FlatParamHandle | None:
    """The handle whose gather comes next after ``current_handle``'s in this backward; None for nothing to prefetch."""
    return state._upcoming()


def _get_training_state(handle: FlatParamHandle | None) -> HandleTrainingState:
    """Where in its step ``handle`` is; idle without one."""
    return handle._training_state if handle is not None else HandleTrainingState.IDLE


def _register_pre_backward_hooks(
    state: StepInstance, module: nn.Module, outputs: Any, handle: FlatParamHandle | None
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


def _register_post_backward_hook(state: StepInstance, handle: FlatParamHandle | None) -> None:
    """Let the instance's backward end once the gradients of its inputs are there."""
    state._watch_pending_inputs()


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
