"""Linear layers that compute with the bytes of a gather, as their precision plugin's ``LinearForm`` says.

Such a unit has no gather buffer in a dtype. Its *lanes* are byte tensors, in one piece of memory that comes and goes;
each holds what every rank sends, rank by rank. The form's tensors are views of them, made once. A module has a *leaf*
under the name of the weight: of the weight's shape and compute dtype, it collects the gradient, and is NaN throughout,
so that no other use of it passes for a computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from ..errors import PluginContractError, StateError, plugin_name
from ..interfaces import SLICE_ALIGNMENT_BYTES, LinearForm
from ..planning import thresholds
from ..planning.layout import FlatLayout
from ..planning.plan import ManagedParameter
from .buffers import FlatBuffer, slices_of
from .direct import Direct
from .parameters import Shown, Swap

#: Attribute of a linear layer under which its ``FormedWeight`` stands while it computes, and None otherwise.
_FORMED = "_polyshard_formed"


class FormBuffer(FlatBuffer):
    """The lanes of one unit, and the tensors that forms made over them. ``views`` are leaves."""

    def __init__(
        self,
        layout: FlatLayout,
        dtype: torch.dtype,
        device: torch.device,
        forms: Sequence[LinearForm],
        *,
        shards: int,
        rank: int,
    ) -> None:
        """``shards``: the number of ranks that share the unit, of which this one is ``rank``."""
        with torch.inference_mode(False):
            super().__init__(torch.empty(layout.padded_numel, dtype=dtype, device="meta"), layout, resizable=True)
            self.device = device
            self._forms, self._rank = tuple(forms), rank
            sizes = [shards * nbytes for form in forms for nbytes in form.lanes]
            ends = list(accumulate(-(-size // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES for size in sizes))
            self.flat = torch.empty(ends[-1], dtype=torch.uint8, device=device)
            storage = self.flat.untyped_storage()
            self.nbytes, self.address = storage.nbytes(), self.flat.data_ptr()
            self._storages = [(storage, self.nbytes)]
            lanes = [
                self.flat.narrow(0, start, size).view(shards, -1)
                for start, size in zip([0, *ends], sizes, strict=False)
            ]
            self.parts = [lane.view(-1) for lane in lanes]
            self.pairs = [(lane.view(-1), lane[rank]) for lane in lanes]
            self.divided, self.owns, self.gaps = True, [], []
            self.behind = [self._arrive]
            # By form.
            self._lanes: list[list[torch.Tensor]] = []
            for form in forms:
                number = len(form.lanes)
                self._lanes.append(lanes[:number])
                del lanes[:number]
            nothing = torch.full((1,), torch.nan, dtype=dtype, device=device)
            self.views = [nothing.expand(slot.shape).detach() for slot in layout.slots]
            #: What each weight's layer computes with. A form's own tensors, which ``arrived`` fills, are always there:
            #: filling them between forward and backward is no change of what autograd saved.
            self.tensors = [
                tuple(tensor.detach() if tensor.untyped_storage() is storage else tensor.data for tensor in each)
                for form, mine in zip(forms, self._lanes, strict=True)
                for each in _bound(form, mine)
            ]
            if len(self.tensors) != len(layout.slots):
                raise PluginContractError(
                    f"bind of {plugin_name(forms[0])} answered tensors of {len(self.tensors)} weights, and there are "
                    f"{len(layout.slots)}. Answer a sequence of tensors for each."
                )
            self.release()

    @override
    def encode(self, shard: torch.Tensor) -> None:
        """Write ``shard`` (``[shard_numel]``, master dtype) into this rank's part of each lane."""
        with torch.no_grad():
            for form, part, lanes in zip(self._forms, slices_of(shard, self.layout), self._lanes, strict=True):
                form.encode(part, [lane[self._rank] for lane in lanes], self._rank)

    def form_of(self, index: int) -> LinearForm:
        return self._forms[self.layout.slots[index].segment if self.layout.segments else 0]

    def _arrive(self) -> None:
        with torch.no_grad():
            for form in self._forms:
                form.arrived()


def _bound(form: LinearForm, lanes: Sequence[torch.Tensor]) -> Sequence[Sequence[torch.Tensor]]:
    answer: Any = form.bind(lanes)
    sound = isinstance(answer, Sequence) and all(
        isinstance(each, Sequence) and all(isinstance(tensor, torch.Tensor) for tensor in each) for each in answer
    )
    if not sound:
        raise PluginContractError(
            f"bind of {plugin_name(form)} answered {answer!r}. Answer a sequence of tensors for each weight."
        )
    checked: Sequence[Sequence[torch.Tensor]] = answer
    return checked


@dataclass(eq=False, slots=True)
class FormedWeight:
    """What a linear layer computes with in the place of its weight."""

    form: LinearForm
    tensors: tuple[torch.Tensor, ...]
    direct: Direct | None
    """Knows where the weight's gradient may be written; None where it has memory of its own."""
    key: torch.Tensor | None
    """By which compiled code finds ``direct``."""


def take_forwards(parameters: Sequence[ManagedParameter]) -> None:
    """Let the linear layers that hold ``parameters`` compute by their forms, once these are there.

    A module's call looks its forward up in front of the hook in which ``compute_with_forms`` comes.
    """
    for parameter in parameters:
        module, _ = parameter.sites[0]
        # One function for all: torch.compile compiles anew wherever it meets another object.
        module.__dict__.update({_FORMED: None, "forward": MethodType(_forward, module)})


def compute_with_forms(
    parameters: Sequence[ManagedParameter], buffer: FormBuffer, claim: Callable[[int], torch.Tensor | None] | None
) -> list[Swap]:
    """Let the linear layers that hold ``parameters`` compute with ``buffer``, and return what tells them when.

    ``claim``: as of ``write_directly``; None where each gradient has memory of its own.

    Raises StateError: a layer got another forward since it was sharded.
    """
    swaps = []
    for index, parameter in enumerate(parameters):
        module, _ = parameter.sites[0]
        if getattr(module.__dict__.get("forward"), "__func__", None) is not _forward:
            raise StateError(
                f"The forward of '{parameter.names[0].removesuffix('.weight')}' was replaced, and its weight is in "
                "bytes that the replacement cannot read. Replace it before shard(), or leave the layer out of the "
                "precision's fp8."
            )
        module.__dict__[_FORMED] = None
        large = buffer.layout.slots[index].numel >= thresholds.DIRECT_NUMEL
        direct = Direct(partial(claim, index)) if claim is not None and large else None
        key = None if direct is None else direct.key()
        there = FormedWeight(buffer.form_of(index), buffer.tensors[index], direct, key)
        swaps.append(
            Swap(module.__dict__, {shown: {_FORMED: there if shown is Shown.VIEWS else None} for shown in Shown})
        )
    return swaps


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    formed: FormedWeight | None = module._polyshard_formed  # type: ignore[assignment]
    weight, bias = module.weight, module.bias
    if formed is None:
        # A whole weight, or a stand-in that refuses to compute.
        return functional.linear(input, weight, bias)
    compiles = torch.compiler.is_dynamo_compiling()
    direct, key = (None, formed.key) if compiles else (formed.direct, None)
    output: torch.Tensor = FormedLinear.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, formed.form, direct, key, *formed.tensors
    )
    return output


class FormedLinear(torch.autograd.Function):
    """A linear layer by its form: products and gradients are the form's, reshapes and the bias are not."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        form: LinearForm,
        direct: Direct | None,
        key: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """``x``: ``[*, in]``; ``weight``: a leaf, ``[out, in]``; ``bias``: ``[out]`` or None; returns ``[*, out]``."""
        # The values of the leaf mean nothing: it is an argument for its gradient alone.
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, key, *tensors)
        ctx.form, ctx.direct = form, direct
        output = form.product(x.reshape(-1, x.shape[-1]), tensors)
        if bias is not None:
            output = output + bias
        return output.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of ``x``, ``weight`` and ``bias``, where they need one."""
        x, key, *tensors = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_x = ctx.form.input_gradient(rows, tensors).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            of_weight = ctx.form.weight_gradient(rows, inputs)
            if key is not None and of_weight is None:
                of_weight = torch.ops.polyshard.weight_gradient(rows, inputs, key)
            place = None if ctx.direct is None else ctx.direct.claim()
            if place is not None:
                of_weight = torch.mm(rows.t(), inputs, out=place) if of_weight is None else place.copy_(of_weight)
            elif of_weight is None:
                of_weight = rows.t().mm(inputs)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None, None, *([None] * len(tensors))
