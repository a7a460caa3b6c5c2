"""Weight gradients of large linear layers, computed where their reduction reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .. import _torch_private, thresholds
from ..planning.layout import FlatLayout
from ..planning.managed_parameter import ManagedParameter

#: Attribute of a module under which ``_Direct`` stands.
_DIRECT = "_polyshard_direct"


class DirectLinear(torch.autograd.Function):
    """``functional.linear`` whose weight gradient is written where ``direct.claim`` says.

    Autograd keeps the tensor that backward returns as the leaf's ``.grad`` when nothing else holds it, so the gradient
    is produced in its place and neither copied nor held twice.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, direct: _Direct, unfilled: bool
    ) -> torch.Tensor:
        """``x``: ``[*, in]``; ``weight``: ``[out, in]``; ``bias``: ``[out]`` or None; returns ``[*, out]``.

        ``unfilled``: the output is memory without values.
        """
        ctx.save_for_backward(x, weight)
        ctx.claim = direct.claim
        output = x.new_empty((*x.shape[:-1], weight.shape[0])) if unfilled else functional.linear(x, weight, bias)
        direct.output = output
        return output

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        """Of ``x``, ``weight`` and ``bias``, where they need one."""
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_x = rows.mm(weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            columns, inputs = rows.t(), x.reshape(-1, x.shape[-1])
            place = ctx.claim()
            of_weight = columns.mm(inputs) if place is None else torch.mm(columns, inputs, out=place)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


def write_directly(
    parameters: Sequence[ManagedParameter], layout: FlatLayout, claim: Callable[[int], torch.Tensor | None]
) -> None:
    """Let the large linear layers that hold one of ``parameters`` write its gradient into the reduction's input.

    ``claim``: answers for an index of ``parameters``, which lie as ``layout`` says, with the memory that the gradient
    belongs in, or None where it needs memory of its own.

    Layers whose forward is somebody else's (a subclass, a replaced method) stay as they are.
    """
    for index, parameter in enumerate(parameters):
        if len(parameter.sites) > 1 or layout.slots[index].numel < thresholds.DIRECT_NUMEL:
            continue
        module, attribute = parameter.sites[0]
        if type(module) is nn.Linear and attribute == "weight" and "forward" not in module.__dict__:
            module.__dict__[_DIRECT] = _Direct(partial(claim, index))
            # One function for all: torch.compile compiles anew wherever it meets another object.
            module.__dict__["forward"] = MethodType(_forward, module)


@dataclass(slots=True)
class _Direct:
    """What the direct forward of one linear layer needs to know."""

    claim: Callable[[], torch.Tensor | None]
    # A checkpoint ends its recomputation at the last tensor that was saved, by an exception. torch's own product saves
    # its inputs before it computes, ours after: what ends here would be computed in vain.
    ends_recomputation: bool = False
    # That exception is raised as autograd saves, and lets go of the output on its way. While the CUDA allocator records
    # its history with Python stacks, memory that is freed under an exception loses it (pytorch#179536, seen in torch
    # 2.11): so the output is held until the exception has been caught.
    output: torch.Tensor | None = None


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a linear layer: direct where autograd records it and nothing else looks inside."""
    if torch.compiler.is_compiling():
        return functional.linear(input, module.weight, module.bias)
    weight, bias = module.weight, module.bias
    if (
        not (torch.is_grad_enabled() and weight.requires_grad)
        or type(input) is not torch.Tensor
        # There is no autocast on the meta device, and asking raises.
        or (not input.is_meta and torch.is_autocast_enabled(input.device.type))
        or _torch_private.in_transform()
    ):
        return functional.linear(input, weight, bias)
    direct: _Direct = module.__dict__[_DIRECT]
    recomputes = _torch_private.in_backward()
    unfilled = recomputes and direct.ends_recomputation
    try:
        output: torch.Tensor = DirectLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, direct, unfilled
        )
    except BaseException:
        direct.ends_recomputation |= recomputes
        raise
    finally:
        direct.output = None
    if unfilled:
        direct.ends_recomputation = False
        with torch.no_grad():
            output.copy_(functional.linear(input, weight, bias))
    return output
