"""The engine's module state with FSDP's habits: when it prefetches, what its handle says of it, who reduces nothing."""

from __future__ import annotations

from collections.abc import Sequence

from polyshard.runtime.module_state import ModuleState
from torch import nn

from . import _runtime_utils
from ._common_utils import HandleTrainingState
from ._idle import IdleUnit
from ._unit import FlatUnit
from .api import BackwardPrefetch


class FSDPStage(ModuleState):
    """One FSDP instance's place in a step."""

    def __init__(
        self,
        instance: _runtime_utils.StepInstance,
        module: nn.Module,
        inner: nn.Module,
        units: Sequence[FlatUnit],
        *,
        full_precision_in_eval: bool,
    ) -> None:
        # Gathered in every module's backward, as in FSDP, whose users see whole parameters there.
        super().__init__("", module, units, full_precision_in_eval=full_precision_in_eval)
        self.instance = instance
        #: The module that the user gave; ``module`` is the one that is called, a wrapper around it or the same.
        self.inner = inner
        #: Whether its backward ends where its own gradients do, and not with the whole backward alone.
        self.ends_by_hook = True
        #: What follows in this backward, as recorded.
        self._ahead: Sequence[ModuleState] = ()

    @property
    def busy(self) -> bool:
        """Whether its forward or its backward runs."""
        return self.entered > 0 or self.in_backward

    def upcoming(self) -> FSDPStage | None:
        """The module state that comes next in this backward, where that is known."""
        module_state = next(iter(self._ahead), None)
        assert module_state is None or isinstance(module_state, FSDPStage)
        return module_state

    def pre_backward(self, *, prefetches: bool = True) -> None:
        if not self.in_backward:
            self.point(HandleTrainingState.BACKWARD_PRE)
        super().pre_backward(prefetches=prefetches)

    def prefetch(self, batches: Sequence[Sequence[ModuleState]]) -> None:
        self._ahead = [module_state for batch in batches for module_state in batch]
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._unshard_next()

    def late_post_backward(self) -> None:
        # Nothing asks for a gradient at its end: it has no hook that ended its backward.
        self.ends_by_hook = any(unit.trainable for unit in self.units)
        try:
            super().late_post_backward()
        finally:
            self.ends_by_hook = True

    def post_backward(self) -> None:
        self.point(HandleTrainingState.BACKWARD_POST)
        self._take_part_if_idle()
        super().post_backward()
        if self.instance.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            # One that has gone through its backward since then needs nothing any more.
            self._ahead = [module_state for module_state in self._ahead if module_state.awaits_backward]
            self._unshard_next()
        self._ahead = ()
        self.point(HandleTrainingState.IDLE)

    def reset(self) -> None:
        super().reset()
        self._ahead = ()
        self.point(HandleTrainingState.IDLE)

    def _unshard_next(self) -> None:
        handle = self.instance._handle
        if handle is None:
            return
        following = _runtime_utils._get_handle_to_prefetch(self.instance, handle)
        if following is not None and following.unit is not None:
            following.unit.unshard()

    def _take_part_if_idle(self) -> None:
        step = self.step
        assert step is not None
        if not (self.joins_reduction and step.accumulates):
            return
        for unit in self.units:
            if not unit.trainable or unit.pending or unit.gradients.unreduced or unit.grid.alone:
                continue
            if step.synchronises:
                self.instance._leave_idle(IdleUnit(unit))
            else:
                # Nothing to keep, and nobody to agree with.
                self.joins_reduction = False

    def point(self, state: HandleTrainingState) -> None:
        """Let the handle say where it is in its step."""
        if self.instance._handle is not None:
            self.instance._handle._training_state = state
