"""Tensors at the boundary of a forward: those that come in and go out, with what a backward calls as it passes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

import torch
from typing_extensions import override

from .. import _torch_private
from ..nested import distinct_tensors, iter_hidden_tensors, iter_tensors, map_tensors

T = TypeVar("T")
#: May return another hook for when what it lets pass is differentiated again: of ``backward(create_graph=True)``.
Hook = Callable[..., "Hook | None"]

_detached = methodcaller("detach")


class Boundary(torch.autograd.Function):
    """Passes tensors through and calls ``callback`` in backward, before passing their gradients on.

    On a unit's inputs it runs once everything on the way to them has its gradient: autograd executes ready nodes in
    the reverse order of their creation, and this node was created before any of the unit's own. On an output it runs
    before any of the unit's nodes, and, unlike a tensor hook, survives in-place changes of an output that is a view.
    """

    @staticmethod
    @override
    def forward(ctx: Any, callback: Hook, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``tensors`` as new tensors over the same memory: an in-place first operation on an input itself raises."""
        ctx.callback = callback
        ctx.set_materialize_grads(False)
        return (tensors[0].detach(),) if len(tensors) == 1 else tuple(map(_detached, tensors))

    @staticmethod
    @override
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tangents

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        again = ctx.callback()
        if again is None:
            return (None, *gradients)
        return None, *pass_through_in(again, gradients, distinct_tensors(gradients, _is_differentiable))


_pass_through = _torch_private.direct(Boundary)


def pass_through(callback: Hook, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """``tensors``, with ``callback`` called in backward before their gradients leave."""
    apply: Callable[..., Any] = Boundary.apply if _torch_private.transforms_active() else _pass_through
    passed: tuple[torch.Tensor, ...] = apply(callback, *tensors)
    for index, tensor in enumerate(tensors):
        if tensor.__dict__:
            # What the program hung on it.
            passed[index].__dict__.update(tensor.__dict__)
    return passed


def pass_through_in(callback: Hook, value: T, tensors: list[torch.Tensor]) -> T:
    """``value`` with ``tensors``, which are distinct, passed through: each stays one tensor wherever it occurs."""
    return exchanged(tensors, pass_through(callback, tensors), value)


def exchanged(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], value: T) -> T:
    """``value`` with ``others`` in the places of ``tensors``."""
    by_id = dict(zip(map(id, tensors), others, strict=True))
    return map_tensors(lambda tensor: by_id.get(id(tensor), tensor), value)


class _Adopt(torch.autograd.Function):
    """Gives ``tensor``, in place, the history of ``changed``, which lies in the same memory."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself: no memory is written."""
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    @override
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def on_gradient(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Call ``hook`` in backward before the node that made ``tensor`` runs. What it returns takes the gradients' place.

    On the node where there is one: ``Tensor.register_hook`` takes eight times as long.
    """
    node = tensor.grad_fn
    if node is not None:
        node.register_prehook(hook)
    else:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def put_node_behind(tensor: torch.Tensor) -> bool:
    """Put a node that does nothing behind the one that made ``tensor``; returns whether that could be done in place.

    A backward then passes a node that is younger than everything computed so far before it passes any of that. Nothing
    is put where the tensor's own node is the youngest. No public call does it without making another tensor.
    """
    if type(tensor) is not torch.Tensor or tensor._is_view():
        # An in-place change of a view rewrites its history, without the node. Other classes see an operation.
        return False
    if _torch_private.sequence_nr(tensor.grad_fn) + 1 == _torch_private.next_sequence_nr():
        return True
    # Modes see an operation, too.
    return not _torch_private.dispatch_modes() and _torch_private.lift(tensor) is tensor


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
            on_gradient(tensor, hook)
            changed = True
    return changed


def watch_output(output: Any, hook: Hook, hang: Callable[[torch.Tensor, Hook], Any] = on_gradient) -> tuple[Any, bool]:
    """``output``, with ``hook`` called before a backward goes through any tensor in it; and whether it can.

    Tensors are found in containers, and in the attributes of objects that are none. Through a leaf no backward goes on,
    and a hook on it would outlive the step. ``hang``: hangs a hook on a tensor.

    A backward calls ``hook`` before it passes anything that was computed so far, whichever way other tensors left the
    forward: autograd executes nodes in the reverse order of their creation, and the one that calls it is new.
    """
    if _torch_private.forward_mode_level() >= 0 or _torch_private.transforms_active():
        return output, _watch_transformed((*iter_tensors(output), *iter_hidden_tensors(output)), hook)
    if isinstance(output, torch.Tensor):
        if output.grad_fn is None:
            return output, False
        if put_node_behind(output):
            hang(output, hook)
            return output, True
    # What is an attribute of an object is not exchanged there: where a new node needs another tensor, it has none.
    watched = [tensor for tensor in iter_hidden_tensors(output) if _has_graph(tensor)]
    for tensor in watched:
        put_node_behind(tensor)
    others: list[torch.Tensor] = []
    for tensor in distinct_tensors(output, _has_graph):
        (watched if put_node_behind(tensor) else others).append(tensor)
    if others:
        passed = pass_through(_nothing, others)
        output = exchanged(others, passed, output)
        watched += passed
    for tensor in watched:
        hang(tensor, hook)
    return output, bool(watched)


def _watch_transformed(tensors: Iterable[torch.Tensor], hook: Hook) -> bool:
    """``watch_output`` of what is differentiated forwards, too: a backward goes through primals and tangents."""
    found = (part for tensor in tensors for part in _torch_private.transformed_parts(tensor) if _has_graph(part))
    parts = {id(part): part for part in found}
    with _torch_private.outside_of_transforms():
        for part in parts.values():
            put_node_behind(part)
            on_gradient(part, hook)
    return bool(parts)


def _nothing() -> None:
    return None


_is_differentiable = attrgetter("requires_grad")


def _has_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None
