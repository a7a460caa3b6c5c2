"""The functions that PyTorch's FSDP1 tests patch, each looked up here when it is called."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._common_utils import HandleTrainingState
from ._flat_param import FlatParamHandle

#: Attributes in which all instances under one root must agree.
HOMOGENEOUS_ATTR_NAMES = ["_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"]


def _unshard(state: Any, handle: FlatParamHandle) -> None:
    """Issue the gather of ``handle``'s flat parameter."""
    handle.unit.gathered.gather()


def _reshard(state: Any, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
    """``handle.reshard``."""
    handle.reshard(free_unsharded_flat_param)


def _post_backward_reshard(state: Any, handle: FlatParamHandle) -> None:
    """Let go of ``handle``'s whole parameters at the end of its backward."""
    handle.unit.gathered.let_go()


def _get_handle_to_prefetch(state: Any, current_handle: FlatParamHandle) -> FlatParamHandle | None:
    """The handle whose gather comes next after ``current_handle``'s in this backward; None for nothing to prefetch."""
    following = state._module_state.upcoming()
    return None if following is None else following.instance._handle


def _get_training_state(handle: FlatParamHandle | None) -> HandleTrainingState:
    """Where in its step ``handle`` is; idle without one."""
    return handle._training_state if handle is not None else HandleTrainingState.IDLE


def _register_pre_backward_hooks(state: Any, module: nn.Module, outputs: Any, handle: FlatParamHandle | None) -> Any:
    """``outputs``, each of which starts the instance's backward before a gradient goes through it."""
    return state._forward.watch_pending_output(outputs)


def _register_post_backward_hook(state: Any, handle: FlatParamHandle | None) -> None:
    """Let the instance's backward end once the gradients of its inputs are there."""
    state._forward.watch_pending_inputs()
