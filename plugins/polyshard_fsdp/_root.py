"""What the outermost FSDP instance shares with those inside it: the engine's root with FSDP's habits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyshard.runtime.root import Root
from polyshard.runtime.unit import refuse_escape
from torch import nn

from ._exec_order import ForwardOrder
from ._idle import IdleUnit
from ._unit import FlatUnit

#: Where `_apply_optimizer_in_backward` leaves a parameter's optimizers.
OPTIMIZERS = "_in_backward_optimizers"


class FSDPRoot(Root):
    """The engine's root over FSDP instances."""

    #: None unless the debug level asks for checks.
    order: ForwardOrder | None = None
    #: Parameters that step as soon as their gradients are reduced.
    stepping: tuple[nn.Parameter, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: list[IdleUnit] = []

    def leave_idle(self, idle: IdleUnit) -> None:
        """A unit takes part in this backward's reductions although this rank has no gradient for it."""
        self._idle.append(idle)

    def refuse_escape(self, output: object) -> None:
        """As the engine's, but for what stays whole until backward ends, as FSDP's root does."""
        units = tuple(
            unit
            for module_state in self.module_states
            if not module_state.awaits_backward
            for unit in module_state.units
        )
        refuse_escape(units, output, "")

    def end_backward(self) -> None:
        super().end_backward()
        for idle in self._idle:
            idle.settle()
        self._idle.clear()
        if self.synchronises and self.stepping:
            _step_in_backward(self.stepping)
        if self.order is not None:
            self.order.end_iteration()
        if not self.synchronises:
            for unit in self.units:
                assert isinstance(unit, FlatUnit)
                unit.flat_gradients.show_unreduced()

    def _turn(self) -> None:
        """Hand reduced gradients over while parameters are shards, which those of the other forward gather again."""
        self.reducer.flush()
        self.streams.drain()

    def _used_of_this_backward(self) -> None:
        """A parameter that was not used in a unit that was has a gradient of zeros in FSDP; of units, see ``_idle``."""

    def abandon(self) -> None:
        super().abandon()
        self._idle.clear()
        if self.order is not None:
            self.order.abandon()


def _step_in_backward(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        # Without a gradient there is nothing of it on this rank, or the backward did not reach it.
        if parameter.grad is None:
            continue
        for optimizer in getattr(parameter, OPTIMIZERS, ()):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
