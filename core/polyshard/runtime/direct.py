"""Large linear layers whose weight gradients are written into the reduction's input, and copied nowhere.

A module's ``forward`` stands in its ``__dict__`` for that. In compiled code the backward's graph holds one operation,
``polyshard::weight_gradient``, that finds the memory when it runs: all equal blocks share one graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from .. import _torch_private
from ..planning import thresholds
from ..planning.layout import FlatLayout
from ..planning.plan import ManagedParameter

#: Attributes of a module: under which ``Direct`` stands, and a tensor that tells compiled code which one that is.
_DIRECT, _KEY = "_polyshard_direct", "_polyshard_direct_key"


def take_forwards(parameters: Sequence[ManagedParameter], layout: FlatLayout) -> None:
    """Let the large linear layers that hold one of ``parameters`` call ours, which computes as theirs for now.

    A module's call looks its forward up in front of the hook in which ``write_directly`` comes. A layer whose first
    call had another one would save other tensors when a checkpoint computes that again.
    """
    for _, module in _large_layers(parameters, layout):
        if "forward" not in module.__dict__:
            # One function for all: torch.compile compiles anew wherever it meets another object.
            module.__dict__["forward"] = MethodType(_forward, module)


def write_directly(
    parameters: Sequence[ManagedParameter], layout: FlatLayout, claim: Callable[[int], torch.Tensor | None] | None
) -> None:
    """Let the layers of ``take_forwards`` write their weight's gradient into the reduction's input.

    ``claim``: returns, for an index of ``parameters`` and ``layout``, the memory for the gradient, or None where it
    needs memory of its own. None for all: layers get their own forward back.

    Layers with another forward (a subclass, a replaced method) stay as they are.
    """
    for index, module in _large_layers(parameters, layout):
        if getattr(module.__dict__.get("forward"), "__func__", None) is not _forward:
            continue
        if claim is None:
            del module.__dict__["forward"]
        else:
            direct = Direct(partial(claim, index))
            module.__dict__.update({_DIRECT: direct, _KEY: direct.key()})


def _large_layers(parameters: Sequence[ManagedParameter], layout: FlatLayout) -> Iterator[tuple[int, nn.Linear]]:
    for index, parameter in enumerate(parameters):
        slot = layout.slots[index]
        # A reduction reads staged ones rank by rank.
        if len(parameter.sites) > 1 or parameter.leaf or slot.dim or slot.numel < thresholds.DIRECT_NUMEL:
            continue
        module, attribute = parameter.sites[0]
        if type(module) is nn.Linear and attribute == "weight":
            yield index, module


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a linear layer: direct where autograd records it, and no autocast or transform is active."""
    weight, bias = module.weight, module.bias
    if torch.compiler.is_dynamo_compiling():
        key = getattr(module, _KEY, None)
        if (
            key is None
            or not (torch.is_grad_enabled() and weight.requires_grad)
            or torch.is_autocast_enabled(input.device.type)
        ):
            return functional.linear(input, weight, bias)
        compiled: torch.Tensor = DirectLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, None, key, False
        )
        return compiled
    direct: Direct | None = module.__dict__.get(_DIRECT)
    if (
        direct is None
        or not (torch.is_grad_enabled() and weight.requires_grad)
        or type(input) is not torch.Tensor
        # There is no autocast on the meta device, and asking raises.
        or (not input.is_meta and torch.is_autocast_enabled(input.device.type))
        or _torch_private.in_transform()
    ):
        return functional.linear(input, weight, bias)
    recomputes = _torch_private.in_backward()
    # Selective checkpoints hand out the product that they kept, and allow no other operation in its place.
    unfilled = recomputes and direct.ends_recomputation and not _torch_private.dispatch_modes()
    try:
        output: torch.Tensor = DirectLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, direct, None, unfilled
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


class DirectLinear(torch.autograd.Function):
    """``functional.linear`` that writes its weight gradient into the memory from ``direct.claim``.

    Autograd keeps the tensor that backward returns as the leaf's ``.grad`` when nothing else holds it, so the gradient
    is computed in place and neither copied nor held twice. Compiled code gets ``key`` instead: what it writes to is
    found when the backward's graph runs.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        direct: Direct | None,
        key: torch.Tensor | None,
        unfilled: bool,
    ) -> torch.Tensor:
        """``x``: ``[*, in]``; ``weight``: ``[out, in]``; ``bias``: ``[out]`` or None; returns ``[*, out]``.

        ``key``: 0-dim, int64, on the CPU. ``unfilled``: the output is memory without values.
        """
        ctx.save_for_backward(x, weight, key)
        output = x.new_empty((*x.shape[:-1], weight.shape[0])) if unfilled else functional.linear(x, weight, bias)
        if direct is not None:
            ctx.claim = direct.claim
            direct.output = output
        return output

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, key = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_x = rows.mm(weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            if key is not None:
                of_weight = torch.ops.polyshard.weight_gradient(rows, inputs, key)
            else:
                place = ctx.claim()
                of_weight = rows.t().mm(inputs) if place is None else torch.mm(rows.t(), inputs, out=place)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None, None


@cache
def _define_operation() -> torch.library.Library:
    """``polyshard::weight_gradient``: defined with the first layer that may need it, for the life of the process."""
    library = torch.library.Library("polyshard", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("weight_gradient(Tensor gradient, Tensor input, Tensor key) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("weight_gradient", _weight_gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("polyshard::weight_gradient", _shape_of_weight_gradient, lib=library)
    return library


def _weight_gradient(gradient: torch.Tensor, input: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``[rows, out]`` and ``[rows, in]`` to ``[out, in]``, in the reduction's input where there is room."""
    direct = _COMPILED.get(int(key))
    place = None if direct is None else direct.claim()
    columns = gradient.t()
    if place is None or place.dtype != gradient.dtype:
        return columns.mm(input)
    return torch.mm(columns, input, out=place)


def _shape_of_weight_gradient(gradient: torch.Tensor, input: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return gradient.new_empty((gradient.shape[1], input.shape[1]))


@dataclass(slots=True, weakref_slot=True)
class Direct:
    """The state of one linear layer's direct forward."""

    claim: Callable[[], torch.Tensor | None]
    # A checkpoint ends its recomputation by an exception, at the last tensor that was saved. torch's own product saves
    # its inputs before it computes, ours after: the product of the layer that ends it would be computed in vain.
    ends_recomputation: bool = False
    # That exception is raised as autograd saves, and frees the output. While the CUDA allocator records its history
    # with Python stacks, memory that is freed under an exception loses it (pytorch#179536, seen in torch 2.11): so the
    # output is held until the exception has been caught.
    output: torch.Tensor | None = None

    def key(self) -> torch.Tensor:
        """A tensor by which ``torch.ops.polyshard.weight_gradient`` finds this one, for as long as it lives."""
        with _DEFINING:
            _define_operation()
        _COMPILED[id(self)] = self
        return torch.tensor(id(self), device="cpu")


# Ranks may be threads.
_DEFINING = threading.Lock()
#: What compiled code finds by a module's key.
_COMPILED: WeakValueDictionary[int, Direct] = WeakValueDictionary()
