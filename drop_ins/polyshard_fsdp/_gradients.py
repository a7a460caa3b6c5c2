"""Gradients of one flat parameter, reduced and shown as FSDP does; communication hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from polyshard.errors import StateError
from polyshard.extension import (
    CommStreams,
    Contribution,
    Copies,
    FlatBuffer,
    FlatLayout,
    Gradients,
    ReductionInput,
    UnitRanks,
    view_of,
)
from polyshard.interfaces import COMPLETED, UnitDtypes, Work
from torch import nn
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

#: Attribute of a gradient that was given other data: the tensor whose data they are.
_SHOWS = "_polyshard_shows"


@dataclass(frozen=True, slots=True)
class HookedRanks(UnitRanks):
    """The ranks of a unit whose gradients a communication hook of the user reduces."""

    hook: Callable[..., Any] = field(kw_only=True)
    state: object = field(compare=False, kw_only=True)

    @override
    def reduce(self, result: torch.Tensor, gradients: torch.Tensor) -> Work:
        # Hooks that compress give tensors other data. Results are fresh, but the input's memory serves later backwards.
        if self.reduction is None:
            self.hook(self.state, gradients)
        else:
            self.hook(self.state, gradients.detach(), result)
        return COMPLETED

    @override
    def reduce_many(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], results: torch.Tensor | None = None
    ) -> Work:
        for result, gradients in pairs:
            self.reduce(result, gradients)
        return COMPLETED


class FlatInput(ReductionInput):
    """Adds up in the compute dtype, in memory that lives as long as any ``.grad`` that shows it."""

    def __init__(self, layout: FlatLayout, dtypes: UnitDtypes, device: torch.device) -> None:
        super().__init__(layout, dtypes.reduce, dtypes.reduce, device)
        self._sum_dtype = dtypes.compute

    def choose(self, dtypes: UnitDtypes) -> None:
        """In which dtypes the next backward accumulates and reduces."""
        if dtypes.reduce != self.dtype:
            self._buffer = None
        self.dtype = self.result_dtype = dtypes.reduce
        self._sum_dtype = dtypes.compute

    @override
    def make_sum(self) -> FlatBuffer:
        with torch.inference_mode(False):
            flat = torch.empty(self.layout.padded_numel, dtype=self._sum_dtype, device=self.device)
            return FlatBuffer(flat, self.layout, resizable=False)

    @override
    def collect(self, buffer: FlatBuffer) -> Copies:
        copies = super().collect(buffer)
        # Not kept for the next accumulation: a user may still hold what ``.grad`` was.
        self.sum = None
        return copies


class FlatGradients(Gradients):
    """Differs from the engine's own in two things.

    - Under ``no_sync`` gradients gather in the compute dtype, and ``.grad`` shows them, whole.
    - What was computed in full precision in eval mode is reduced in full precision.
    """

    input: FlatInput

    def __init__(self, unit: Any) -> None:
        super().__init__(unit, unit.layout, unit.dtypes, unit.held.gradient_targets, unit.offload_manager)
        self.input = self.sums = FlatInput(unit.layout, unit.dtypes, unit.spec.device)
        self._unit = unit
        self._training_dtypes = unit.dtypes
        #: ``.grad`` of the parameters from before the first backward under ``no_sync``; None while that shows.
        self._reduced_before: list[tuple[nn.Parameter, torch.Tensor | None]] | None = None
        # Unreduced gradients live as long as any ``.grad`` that shows them, as reduced ones do.
        self._whole: TensorWeakRef | None = None
        self._shown_at: list[int] = []

    def choose(self, full_precision: bool) -> None:
        """In which dtypes the next backward accumulates and reduces."""
        dtypes = self._training_dtypes
        if full_precision:
            master = self.unit.spec.master_dtype
            dtypes = UnitDtypes(compute=master, communication=master, reduce=master, grad=master)
        self._dtypes = dtypes
        self.input.choose(dtypes)

    @override
    def keep(self, gradients: list[torch.Tensor | None], streams: CommStreams) -> None:
        self._take_back()
        super().keep(gradients, streams)

    @override
    def contribute(self, gradients: list[torch.Tensor | None], streams: CommStreams) -> Contribution:
        self._take_back()
        self._restore_reduced()
        return super().contribute(gradients, streams)

    def show_unreduced(self) -> None:
        """Let ``.grad`` be what waits for a synchronising backward; called when a backward under ``no_sync`` ended."""
        if not self.input.has_sum or self.input.sum is None:
            return
        whole, self.input.sum = self.input.sum.flat, None
        if self._whole is not None and self._whole() is whole:
            return
        shown = self._unit.unreduced_gradients(whole)
        if self._reduced_before is None:
            self._reduced_before = [(parameter, parameter.grad) for parameter, _ in shown]
        for parameter, gradient in shown:
            self.show(parameter, gradient)
        self._whole = TensorWeakRef(whole)
        self._shown_at = [gradient.data_ptr() for _, gradient in shown]

    def show(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Let ``parameter.grad`` be ``gradient``, a shard's or a whole one."""
        if gradient is None or (
            gradient.shape == parameter.shape
            and gradient.dtype == self._unit.dtypes.grad
            and gradient.device == parameter.device
        ):
            parameter.grad = gradient
            return
        # Through ``.data``: the parameter is a shard in the original dtype, on the host where it is offloaded, and the
        # gradient a whole one in the compute dtype where it was computed. Autograd would refuse the pair.
        shown = parameter.grad = torch.empty_like(parameter, dtype=self._unit.dtypes.grad)
        shown.data = gradient
        setattr(shown, _SHOWS, gradient)

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
        for target, gradient in zip(self._targets, gradients, strict=True):
            if gradient is not None:
                view_of(shard, target.shape, target.stride, target.offset).copy_(gradient)
        return shard

    def drop_unreduced_if_cleared(self) -> None:
        """Honour a ``zero_grad(set_to_none=True)`` between backwards under ``no_sync``."""
        before = self._reduced_before
        if before is not None and all(parameter.grad is None for parameter, _ in before):
            self.input.sum = self._whole = self._reduced_before = None
            self.input.has_sum = False

    def _take_back(self) -> None:
        """Have the buffer again that ``.grad`` shows, with what the user did to ``.grad`` since then.

        Raises:
            StateError: the user gave it another shape.
        """
        if self.input.sum is not None or not self.input.has_sum:
            return
        self.drop_unreduced_if_cleared()
        if not self.input.has_sum:
            return
        whole = None if self._whole is None else self._whole()
        if whole is None:
            self.input.sum = self.input.make_sum()
            self.input.sum.flat.zero_()
        else:
            self.input.sum = FlatBuffer(whole, self._layout, resizable=False)
        shown = self._unit.unreduced_gradients(self.input.sum.flat)
        current = [parameter.grad for parameter, _ in shown]
        if whole is not None and [None if each is None else each.data_ptr() for each in current] == self._shown_at:
            return
        self._whole = None
        for (_, gradient), given in zip(shown, current, strict=True):
            if given is None:
                gradient.zero_()
            elif given.shape != gradient.shape:
                raise StateError(
                    f"Cannot writeback when the gradient shape changes\nExpects {gradient.shape} but got {given.shape} "
                    f"in unit '{self._unit.name}' on rank {self.unit.ranks.world.rank}, whose gradients under "
                    "no_sync() are whole. Set .grad to a tensor of the whole shape, or to None."
                )
            elif given.data_ptr() != gradient.data_ptr():
                gradient.copy_(given)

    def _restore_reduced(self) -> None:
        if self._reduced_before is not None:
            for parameter, gradient in self._reduced_before:
                parameter.grad = gradient
            self._reduced_before = self._whole = None
