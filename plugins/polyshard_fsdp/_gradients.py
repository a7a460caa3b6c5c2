"""Gradients of one flat parameter, reduced and shown as FSDP does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from polyshard.engine.bucket import PendingReduction
from polyshard.engine.buffer import FlatBuffer, view_of
from polyshard.engine.lanes import Lanes
from polyshard.engine.reduction import Gradients
from polyshard.engine.step import Step
from polyshard.interfaces import COMPLETED, UnitDtypes, Work
from torch import nn

if TYPE_CHECKING:
    from ._unit import FlatUnit


@dataclass(frozen=True, slots=True)
class CommHook:
    """What a user registered in the place of the reduction."""

    state: object
    hook: Callable[..., Any]


class FlatGradients(Gradients):
    """Differs from the engine's own in three things.

    - Under ``no_sync`` gradients gather in the compute dtype, and ``.grad`` shows them, whole.
    - A communication hook may stand in the place of the reduction.
    - What was computed in full precision in eval mode is reduced in full precision.
    """

    def __init__(self, unit: FlatUnit) -> None:
        super().__init__(unit.spec, unit.layout, unit.grid, unit.dtypes, unit.originals.recipients, unit.offload)
        self._unit = unit
        self._training_dtypes = unit.dtypes
        #: ``.grad`` of the parameters from before the first backward under ``no_sync``; None while that shows.
        self._reduced_before: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None

    def choose(self, full_precision: bool) -> None:
        """In which dtypes the next backward accumulates and reduces."""
        dtypes = self._training_dtypes
        if full_precision:
            master = self.spec.master_dtype
            dtypes = UnitDtypes(compute=master, wire=master, reduce=master, grad=master)
        if dtypes.reduce != self._dtypes.reduce:
            self._wire = None
        self._dtypes = dtypes
        self._wire_dtype = dtypes.reduce

    def keep(self, gradients: list[torch.Tensor | None], lanes: Lanes) -> None:
        if self._unreduced is None:
            self._unreduced = FlatBuffer.allocate(self._layout, self._dtypes.compute, self.spec.device)
        super().keep(gradients, lanes)

    def reduce(self, gradients: list[torch.Tensor | None], step: Step) -> None:
        self._restore_reduced()
        super().reduce(gradients, step)

    def show_unreduced(self) -> None:
        """Let ``.grad`` be what waits for a synchronising backward; called when a backward under ``no_sync`` ended."""
        if not self._has_unreduced or self._reduced_before is not None:
            return
        assert self._unreduced is not None
        shown = self._unit.unreduced_gradients(self._unreduced)
        self._reduced_before = [(parameter, parameter.grad) for parameter, _ in shown]
        for parameter, gradient in shown:
            if not parameter.requires_grad:
                continue
            self.show(parameter, gradient)

    def show(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Let ``parameter.grad`` be ``gradient``, a shard's or a whole one."""
        if gradient is None or (gradient.shape == parameter.shape and gradient.dtype == self._unit.dtypes.grad):
            parameter.grad = gradient
            return
        # Through ``.data``: the parameter is a shard in the original dtype, the gradient a whole one in the compute
        # dtype, and autograd would refuse the pair.
        parameter.grad = torch.empty_like(parameter, dtype=self._unit.dtypes.grad)
        parameter.grad.data = gradient

    @property
    def shows_unreduced(self) -> bool:
        """Whether ``.grad`` is what waits for a synchronising backward, and not a reduced gradient."""
        return self._reduced_before is not None

    def reduced_shard(self) -> torch.Tensor | None:
        """This rank's reduced gradient (``[shard_numel]``), zero where a parameter has none; None where none has."""
        if self._reduced_before is None and (whole := self.delivered) is not None:
            return whole
        shown = {parameter: parameter.grad for parameter in self._owners}
        shown.update(self._reduced_before or ())
        gradients = [shown[owner] for owner in self._owners]
        if all(gradient is None for gradient in gradients):
            return None
        shard = torch.zeros(self._layout.shard_numel, dtype=self._dtypes.grad, device=self._unit.master.device)
        for recipient, gradient in zip(self._recipients, gradients, strict=True):
            if gradient is not None:
                view_of(shard, recipient.shape, recipient.stride, recipient.offset).copy_(gradient)
        return shard

    def drop_unreduced_if_cleared(self) -> None:
        """Honour a ``zero_grad(set_to_none=True)`` between backwards under ``no_sync``."""
        before = self._reduced_before
        if before is not None and all(parameter.grad is None for parameter, _ in before):
            assert self._unreduced is not None
            self._unreduced.release()
            self._has_unreduced = False
            self._reduced_before = None

    def _restore_reduced(self) -> None:
        if self._reduced_before is not None:
            for parameter, gradient in self._reduced_before:
                parameter.grad = gradient
            self._reduced_before = None

    def issue(self, reduction: PendingReduction) -> Work:
        registered = self._unit.comm_hook
        if registered is None:
            return super().issue(reduction)
        state, hook = registered.state, registered.hook
        # Hooks that compress give the tensor other data, and the wire's memory serves the next backward too.
        wire = reduction.input.detach()
        if self.grid.shard is None:
            hook(state, wire)
            self._results[-1] = wire
        else:
            result = torch.empty(self._layout.shard_numel, dtype=wire.dtype, device=wire.device)
            hook(state, wire, result)
            self._results[-1] = result
        return COMPLETED
