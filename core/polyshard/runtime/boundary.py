"""Tensors at the boundary of a forward: those that come in and go out, with what a backward calls as it passes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import is_, methodcaller
from typing import Any, TypeVar

import torch
from torch import nn

from .. import _torch_private
from ..nested import distinct_tensors, iter_hidden_tensors, iter_tensors, map_tensors

T = TypeVar("T")
Hook = Callable[..., None]

_detached = methodcaller("detach")
#: Attributes of every module, which are nobody's results.
_TORCHS = frozenset(nn.Module().__dict__)


class Boundary(torch.autograd.Function):
    """Passes tensors through and calls ``callback`` in backward, before passing their gradients on.

    On a unit's inputs it runs once everything on the way to them has its gradient: autograd executes ready nodes in
    the reverse order of their creation, and this node was created before any of the unit's own. On an output it runs
    before any of the unit's nodes, and, unlike a tensor hook, survives in-place changes of an output that is a view.
    """

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``tensors`` as new tensors over the same memory: an in-place first operation on an input itself raises."""
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return tuple(map(_detached, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Call back, then pass every gradient on."""
        ctx.callback()
        return (None, *gradients)


_pass_through = _torch_private.direct(Boundary)


def pass_through(callback: Callable[[], None], tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``tensors``, with ``callback`` called in backward before their gradients leave."""
    apply: Callable[..., Any] = Boundary.apply if _torch_private.transforms_active() else _pass_through
    passed: tuple[torch.Tensor, ...] = apply(callback, *tensors)
    return passed


def pass_through_in(callback: Callable[[], None], value: T, tensors: list[torch.Tensor]) -> T:
    """``value`` with ``tensors``, which are distinct, passed through: each stays one tensor wherever it occurs."""
    return exchanged(tensors, pass_through(callback, tensors), value)


def exchanged(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], value: T) -> T:
    """``value`` with ``others`` in the places of ``tensors``."""
    by_id = dict(zip(map(id, tensors), others, strict=True))
    return map_tensors(lambda tensor: by_id.get(id(tensor), tensor), value)


class _Adopt(torch.autograd.Function):
    """Gives ``tensor``, in place, the history of ``changed``, which lies in the same memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself: no memory is written."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        """The gradient is that of ``changed``."""
        return None, gradient


def adopt_in_place(given: Sequence[torch.Tensor], passed: Sequence[torch.Tensor], hook: Hook) -> bool:
    """Let the caller's tensors have the history of in-place changes that a module made to its inputs.

    The module got ``passed``, new tensors over the memory of ``given``: without this a caller that goes on with its own
    tensor would get gradients that lack the change. Views and leaves are left alone: autograd refuses most of these.

    Returns:
        Whether any was changed. ``hook`` is then called before a backward goes through it, as through an output.
    """
    changed = False
    for tensor, own in zip(given, passed, strict=True):
        # An in-place operation that autograd saw has put another node in the boundary's place.
        seen = own.grad_fn is not None and own.grad_fn.name() != f"{Boundary.__name__}Backward"
        if seen and tensor.grad_fn is not None and not tensor._is_view():
            # Tensors that the module saved for backward lie in this memory, too, and nothing is written to it.
            with _torch_private.unchanged_version(tensor):
                _Adopt.apply(tensor, own)  # type: ignore[no-untyped-call]
            _torch_private.on_gradient(tensor, hook)
            changed = True
    return changed


def watch_output(output: Any, hook: Hook) -> tuple[Any, bool]:
    """``output``, with ``hook`` called before a backward goes through any tensor in it; and whether it can.

    Tensors are found in containers, and in the attributes of objects that are none. Through a leaf no backward goes on,
    and a hook on it would outlive the step.
    """
    if isinstance(output, torch.Tensor):
        if output.grad_fn is None:
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

    A backward may enter the unit through them as through its output. Which attributes of ``modules()`` they are is
    found after the first forward, and again when there are others than then, or something in the place of nothing.
    Forwards look at those alone; whether others have come is compared at C speed.
    """

    def __init__(self, modules: Callable[[], Iterable[nn.Module]]) -> None:
        self._modules = modules
        self._places: list[tuple[dict[str, Any], str]] = []
        # The attributes of each module, and how many there were.
        self._attributes: list[dict[str, Any]] = []
        self._sizes = [-1]
        # Those that were nothing: where they stand, under which name, and what they were.
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._blank: list[Any] = []

    def watch(self, hook: Hook) -> bool:
        """Call ``hook`` before a backward goes through any of them; whether there is one."""
        if list(map(len, self._attributes)) != self._sizes or (
            self._keys and not all(map(is_, map(dict.get, self._holders, self._keys), self._blank))
        ):
            self._find()
        watched = False
        for attributes, key in self._places:
            for tensor in iter_tensors(attributes.get(key)):
                if _has_graph(tensor):
                    _torch_private.on_gradient(tensor, hook)
                    watched = True
        return watched

    def _find(self) -> None:
        modules = list(self._modules())
        buffers = [module._buffers for module in modules if module._buffers]
        self._attributes = [*(module.__dict__ for module in modules), *buffers]
        self._sizes = list(map(len, self._attributes))
        found = [(each, key, value) for each in self._attributes for key, value in each.items() if key not in _TORCHS]
        blank = [each for each in found if each[2] is None or (type(each[2]) in (int, float) and not each[2])]
        # Buffers are many, and nearly always stay the tensors that they are.
        held = {id(value) for each in buffers for value in each.values() if value is not None and not _has_graph(value)}
        blank += [each for each in found if id(each[2]) in held]
        self._places = [(each, key) for each, key, value in found if id(value) not in held and _may_hold_a_graph(value)]
        self._holders = [each for each, _, _ in blank]
        self._keys = [key for _, key, _ in blank]
        self._blank = [value for _, _, value in blank]


def _may_hold_a_graph(value: Any) -> bool:
    """Whether it does, or is a tensor or a container that may next time."""
    if isinstance(value, torch.Tensor) or (isinstance(value, list | dict | set | deque) and not value):
        return True
    return any(_has_graph(tensor) for tensor in iter_tensors(value))


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None
