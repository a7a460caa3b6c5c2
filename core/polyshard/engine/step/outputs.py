"""What leaves a unit's forward: tensors through which a backward comes back, and memory that must not leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UnshardedUseError
from .. import _torch_private
from ..tensors import distinct_tensors, iter_hidden_tensors, iter_tensors
from .boundary import pass_through_in
from .unit import Unit, UnitState

Hook = Callable[..., None]


def watch_output(output: Any, hook: Hook) -> tuple[Any, bool]:
    """``output``, with ``hook`` called before a backward goes through any tensor in it; and whether it can.

    Tensors are found in containers, and in the attributes of objects that are none. Through a leaf no backward goes on,
    and a hook on it would outlive the step.
    """
    if isinstance(output, torch.Tensor):
        if not _has_graph(output):
            return output, False
        if not output._is_view():
            _torch_private.on_gradient(output, hook)
            return output, True
    hidden = [tensor for tensor in iter_hidden_tensors(output) if _has_graph(tensor)]
    found = distinct_tensors(output, _has_graph)
    for tensor in hidden:
        _torch_private.on_gradient(tensor, hook)
    if not any(tensor._is_view() for tensor in found):
        for tensor in found:
            _torch_private.on_gradient(tensor, hook)
        return output, bool(found or hidden)
    # An in-place change of a view rewrites its history and would drop a hook on it, and backward would then read
    # released memory. The boundary's output is no view.
    return pass_through_in(hook, output, found), True


class SideOutputs:
    """Tensors that a forward leaves in attributes of its modules: the losses of a mixture's routers, say.

    A backward may enter the unit through them as through its output. Which attributes they are is found after the first
    forward, once; later forwards look at those alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (module.__dict__, key)
            for module in modules
            for key, value in module.__dict__.items()
            if not key.startswith("_") and any(_has_graph(tensor) for tensor in iter_tensors(value))
        ]

    def watch(self, hook: Hook) -> bool:
        """Call ``hook`` before a backward goes through any of them; whether there is one."""
        watched = False
        for attributes, key in self._places:
            for tensor in iter_tensors(attributes.get(key)):
                if _has_graph(tensor):
                    _torch_private.on_gradient(tensor, hook)
                    watched = True
        return watched


def refuse_escape(units: Sequence[Unit], output: Any, stage: str, rank: int) -> None:
    """Raise if ``output`` lies in memory of ``units`` that is about to be released: reading it then is a crash.

    Raises:
        UnshardedUseError: naming the parameter.
    """
    held = [unit for unit in units if not unit.permanent and unit.state is UnitState.UNSHARDED]
    if not held:
        return
    tensors: Iterable[torch.Tensor] = (
        (output,) if isinstance(output, torch.Tensor) else (*iter_tensors(output), *iter_hidden_tensors(output))
    )
    for tensor in tensors:
        for unit in held:
            if tensor.device == unit.buffer.flat.device and tensor.numel() and unit.buffer.holds(tensor):
                raise UnshardedUseError(
                    f"The forward of '{stage or '(root)'}' returned memory of the parameter '{_owner(unit, tensor)}' "
                    f"on rank {rank}, which is released when the forward ends. Return a clone, or compute with it "
                    "inside the forward."
                )


def _owner(unit: Unit, tensor: torch.Tensor) -> str:
    offset = (tensor.data_ptr() - unit.buffer.address) // unit.buffer.flat.element_size()
    for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
        if slot.offset <= offset < slot.end:
            return parameter.names[0]
    return unit.name


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None
