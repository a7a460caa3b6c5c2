"""The engine's stage with FSDP's habits: what its root does to inputs, where hooks hang, when it prefetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyshard.engine import _torch_private
from polyshard.engine.step.outputs import SideOutputs
from polyshard.engine.step.stage import Stage
from polyshard.engine.tensors import iter_hidden_tensors, iter_tensors
from torch import nn

from . import _runtime_utils
from ._common_utils import HandleTrainingState
from ._idle import IdleUnit
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
        observed: Sequence[tuple[nn.Module, str]] = (),
    ) -> None:
        super().__init__("", module, units, full_precision_in_eval=full_precision_in_eval)
        self.instance = instance
        #: The module that the user gave; ``module`` is the one that is called, a wrapper around it or the same.
        self.inner = inner
        self._pending: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        #: Whether its backward ends where its own gradients do, and not with the whole backward alone.
        self.ends_by_hook = True
        #: What follows in this backward, as recorded.
        self._ahead: Sequence[Stage] = ()
        #: Parameters whose modules are told, through ``__setattr__``, what stands for them.
        self._observed = tuple(observed)

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
        if recomputes:
            return super()._pre_forward(module, args, kwargs)
        self._mark(HandleTrainingState.FORWARD)
        args, kwargs = super()._pre_forward(module, args, kwargs)
        if self._observed:
            self._assign_anew()
        return args, kwargs

    def _post_forward(self, module: nn.Module, output: Any) -> Any:
        try:
            return super()._post_forward(module, output)
        finally:
            if not self.in_backward:
                self._mark(HandleTrainingState.IDLE)
            if self._observed:
                self._assign_anew()

    def _watch_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._pending = (args, kwargs)
        _runtime_utils._register_post_backward_hook(self.instance, self.instance._handle)
        pending, self._pending = self._pending, ((), {})
        return pending

    def _watch_output(self, output: Any) -> tuple[Any, bool]:
        watched = any(tensor.grad_fn is not None for tensor in (*iter_tensors(output), *iter_hidden_tensors(output)))
        if watched:
            instance = self.instance
            output = _runtime_utils._register_pre_backward_hooks(instance, self.module, output, instance._handle)
        if self._side_outputs is None:
            self._side_outputs = SideOutputs(self._own_modules())
        return output, self._side_outputs.watch(self._gradient_hook()) or watched

    def upcoming(self) -> FSDPStage | None:
        """The stage that comes next in this backward, where that is known."""
        stage = next(iter(self._ahead), None)
        assert stage is None or isinstance(stage, FSDPStage)
        return stage

    def pre_backward(self) -> None:
        if not self.in_backward:
            self._mark(HandleTrainingState.BACKWARD_PRE)
        super().pre_backward()

    def _needs_parameters_in_backward(self) -> bool:
        # As in FSDP, whose users see whole parameters in every module's backward.
        return True

    def _prefetch(self, batches: Sequence[Sequence[Stage]]) -> None:
        self._ahead = [stage for batch in batches for stage in batch]
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._unshard_next()

    def catch_up(self) -> None:
        # Nothing asks for a gradient at its end: it has no hook that ended its backward.
        self.ends_by_hook = any(unit.trainable for unit in self.units)
        try:
            super().catch_up()
        finally:
            self.ends_by_hook = True

    def finish(self) -> None:
        self._mark(HandleTrainingState.BACKWARD_POST)
        self._take_part_if_idle()
        super().finish()
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            # One that has gone through its backward since then needs nothing any more.
            self._ahead = [stage for stage in self._ahead if stage.awaits_backward]
            self._unshard_next()
        self._ahead = ()
        self._mark(HandleTrainingState.IDLE)

    def reset(self) -> None:
        super().reset()
        self._ahead = ()
        self._mark(HandleTrainingState.IDLE)

    def _unshard_next(self) -> None:
        handle = self.instance._handle
        if handle is None:
            return
        following = _runtime_utils._get_handle_to_prefetch(self.instance, handle)
        if following is not None and following.unit is not None:
            following.unit.unshard()

    def _take_part_if_idle(self) -> None:
        root = self.root
        assert root is not None
        if not (self.owes and root.accumulates):
            return
        for unit in self.units:
            if not unit.trainable or unit.pending or unit.gradients.unreduced or unit.grid.alone:
                continue
            if root.synchronises:
                self.instance._leave_idle(IdleUnit(unit))
            else:
                # Nothing to keep, and nobody to agree with.
                self.owes = False

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

    def _mark(self, state: HandleTrainingState) -> None:
        if self.instance._handle is not None:
            self.instance._handle._training_state = state
