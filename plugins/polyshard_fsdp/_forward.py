"""The engine's forward of a module state with FSDP's habits: what its root does to inputs, where hooks hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyshard import _torch_private
from polyshard.nested import iter_hidden_tensors, iter_tensors
from polyshard.runtime.hooks import ForwardHooks, output_hook
from polyshard.runtime.root import root_of
from torch import nn

from . import _runtime_utils
from ._common_utils import HandleTrainingState
from ._stage import FSDPStage


class FSDPForward(ForwardHooks):
    """One FSDP instance's forward."""

    module_state: FSDPStage

    def __init__(self, module_state: FSDPStage, observed: Sequence[tuple[nn.Module, str]]) -> None:
        """``observed``: parameters whose modules are told, through ``__setattr__``, what stands for them."""
        super().__init__(module_state)
        self._observed = tuple(observed)
        self._pending: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def watch_pending_inputs(self) -> None:
        """Let backward end at the inputs of the forward that is being entered."""
        self._pending = super()._watch_inputs(*self._pending)

    def _pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module_state, instance = self.module_state, self.module_state.instance
        instance._enter_forward()
        recomputes = _torch_private.in_backward()
        policy = instance.mixed_precision
        if instance._is_root and not recomputes and root_of(module_state).active is None:
            args, kwargs = _runtime_utils._move_inputs(args, kwargs, instance.compute_device)
            instance._place_buffers()
        casts = policy.cast_root_forward_inputs if instance._is_root else policy.cast_forward_inputs
        if casts and not module_state.in_full_precision and (instance._is_root or module_state.units):
            args, kwargs = _runtime_utils._cast_forward_inputs(policy.param_dtype, args, kwargs)
        if recomputes:
            return super()._pre_forward(args, kwargs)
        module_state.point(HandleTrainingState.FORWARD)
        args, kwargs = super()._pre_forward(args, kwargs)
        if self._observed:
            self._assign_anew()
        return args, kwargs

    def _post_forward(self, output: Any) -> Any:
        try:
            return super()._post_forward(output)
        finally:
            if not self.module_state.in_backward:
                self.module_state.point(HandleTrainingState.IDLE)
            if self._observed:
                self._assign_anew()

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._pending = (args, kwargs)
        instance = self.module_state.instance
        _runtime_utils._register_post_backward_hook(instance, instance._handle)
        pending, self._pending = self._pending, ((), {})
        return pending

    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        watched = any(tensor.grad_fn is not None for tensor in (*iter_tensors(output), *iter_hidden_tensors(output)))
        if watched:
            instance = self.module_state.instance
            output = _runtime_utils._register_pre_backward_hooks(
                instance, self.module_state.module, output, instance._handle
            )
        return output, self.side_outputs.watch(output_hook(self.module_state)) or watched

    def _assign_anew(self) -> None:
        for module, attribute in self._observed:
            parameters = dict(module._parameters)
            if attribute not in parameters:
                setattr(module, attribute, module.__dict__[attribute])
                continue
            # ``nn.Module`` refuses a plain tensor in a parameter's place.
            del module._parameters[attribute]
            setattr(module, attribute, parameters[attribute])
            module.__dict__.pop(attribute, None)
            module._parameters.clear()
            module._parameters.update(parameters)
