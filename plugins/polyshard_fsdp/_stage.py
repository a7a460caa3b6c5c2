"""The engine's stage with FSDP's habits: what its root does to inputs, where hooks hang, when it prefetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyshard.engine import _torch_private
from polyshard.engine.outputs import SideOutputs
from polyshard.engine.stage import Stage
from polyshard.engine.tensors import iter_hidden_tensors, iter_tensors
from torch import nn

from . import _runtime_utils
from ._common_utils import HandleTrainingState
from .api import BackwardPrefetch

if TYPE_CHECKING:
    from ._state import FSDPInstance
    from ._unit import FlatUnit


class FSDPStage(Stage):
    """One FSDP instance's forward and backward."""

    def __init__(
        self,
        instance: FSDPInstance,
        module: nn.Module,
        inner: nn.Module,
        units: Sequence[FlatUnit],
        *,
        full_precision_in_eval: bool,
    ) -> None:
        super().__init__("", module, units, full_precision_in_eval=full_precision_in_eval)
        self.instance = instance
        #: The module that the user gave; ``module`` is the one that is called, a wrapper around it or the same.
        self.inner = inner
        self._pending: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._after_backward: Sequence[Stage] = ()

    @property
    def busy(self) -> bool:
        """Whether its forward or its backward runs."""
        return self.entered or self.in_backward

    def gradient_hook(self) -> Callable[..., None]:
        """What a gradient that reaches one of the forward's outputs calls."""
        return self._gradient_hook()

    def watch_pending_inputs(self) -> None:
        """Let backward end at the inputs of the forward that is being entered."""
        self._pending = super()._watch_inputs(*self._pending)

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        instance = self.instance
        instance._enter_forward()
        recomputes = _torch_private.in_backward()
        root = self.root
        assert root is not None
        outermost = instance._is_root and not recomputes and root.active is None
        policy = instance.mixed_precision
        if outermost:
            args, kwargs = _runtime_utils._move_inputs(args, kwargs, instance.compute_device)
            instance._place_buffers()
        casts = policy.cast_root_forward_inputs if instance._is_root else policy.cast_forward_inputs
        if casts and not self._in_full_precision and (instance._is_root or self.units):
            args, kwargs = _runtime_utils._cast_forward_inputs(policy.param_dtype, args, kwargs)
        self._mark(HandleTrainingState.FORWARD)
        return super()._pre_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, output: Any) -> Any:
        try:
            return super()._post_forward(module, output)
        finally:
            self._mark(HandleTrainingState.IDLE)

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._pending = (args, kwargs)
        _runtime_utils._register_post_backward_hook(self.instance, self.instance._handle)
        pending, self._pending = self._pending, ((), {})
        return pending

    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        watched = any(tensor.requires_grad for tensor in (*iter_tensors(output), *iter_hidden_tensors(output)))
        if watched:
            instance = self.instance
            output = _runtime_utils._register_pre_backward_hooks(instance, self.module, output, instance._handle)
        if self._side_outputs is None:
            self._side_outputs = SideOutputs(self._own_modules())
        return output, self._side_outputs.watch(self._gradient_hook()) or watched

    def _prefetch(self, stages: Sequence[Stage]) -> None:
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            super()._prefetch(stages)
        elif self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._after_backward = stages

    def finish(self) -> None:
        super().finish()
        self._mark(HandleTrainingState.IDLE)
        after, self._after_backward = self._after_backward, ()
        for stage in after:
            # One that has gone through its backward since then needs nothing any more.
            if stage.awaits_backward:
                stage.unshard()

    def reset(self) -> None:
        super().reset()
        self._after_backward = ()
        self._mark(HandleTrainingState.IDLE)

    def _mark(self, state: HandleTrainingState) -> None:
        if self.instance._handle is not None:
            self.instance._handle._training_state = state
