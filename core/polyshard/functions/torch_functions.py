"""What follows sharded models from optimizers' steps, and a backward that finds their parameters.

[Note: torch's functions]
Parameters are ``DTensor``, for which torch's functions are right. None of these is exchanged: what the engine must know
of a backward, its hooks and autograd's callbacks tell.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _torch_private
from ..errors import UnsupportedError
from ..runtime.live_roots import live_roots
from ..runtime.root import Root
from ..runtime.unit import Unit
from .optimizers import OptimizerCheck
from .whole import load_whole_values

_installing = threading.Lock()
_checks: list[OptimizerCheck] = []
_loading: WeakSet[Unit] = WeakSet()


def prepare() -> None:
    """Have what ``follow`` needs of torch, before a model is changed.

    Raises UnsupportedError: this torch's checkpoints cannot be seen.
    """
    with _installing:
        if _checks:
            return
        if not _torch_private.sees_checkpoints():
            raise UnsupportedError(
                f"Calls of torch.utils.checkpoint.checkpoint of torch {torch.__version__} are not what polyshard knows "
                "of torch 2.11 to 2.15, so that ranks could not agree on what is computed again. Use one of these, or "
                "a newer polyshard."
            )
        check = OptimizerCheck(live_roots)
        register_optimizer_step_pre_hook(check.before_step)
        _checks.append(check)


def follow(root: Root) -> None:
    """Let torch's functions and optimizers find the parameters of ``root``; let its modules load whole values."""
    prepare()
    with _installing:
        _checks[0].forget()
        live_roots.add(root)
        # Modules that become part of a larger model have their load hooks.
        new = [unit for unit in root.units if unit not in _loading]
        _loading.update(new)
    load_whole_values(new)


@contextmanager
def replacing_values(root: Root, context: str, values: str) -> Iterator[None]:
    """Inside of ``context``, masters of ``root`` hold other ``values``: steps and backwards of it raise."""
    before, root.replaced = root.replaced, (context, values)
    # Optimizers that were let through are looked at again. Nobody looks where ``shard`` was never called: a drop-in.
    for check in _checks:
        check.forget()
    try:
        yield
    finally:
        root.replaced = before


@_torch_private.hidden_from_compile
def backward(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    """``torch.autograd.backward``, whose ``inputs`` may be parameters of sharded models. Every rank calls it.

    Torch's function leaves parameters that ``inputs`` names without a gradient, in silence. Inside of a forward,
    ``.grad`` is there when this returns. By torch's, gradients of modules that have not returned come when they return,
    or when an optimizer steps, unless the backward passed a tensor that a module returned. All else is the same.

    Args:
        tensors, grad_tensors, retain_graph, create_graph: As of ``torch.autograd.backward``.
        inputs: The tensors and parameters whose gradients are added up; all that ``tensors`` depend on where None.
    """
    leaves, roots = (None, []) if inputs is None else _leaves_of(inputs)
    with ExitStack() as named:
        for each in roots:
            named.enter_context(each.backward_to_named())
        torch.autograd.backward(tensors, grad_tensors, retain_graph, create_graph, inputs=leaves)  # type: ignore[arg-type, unused-ignore]
    for reference in live_roots.references:
        root = reference()
        # A backward inside of another one ends with that.
        if root is not None and root.active is not None and not _torch_private.in_backward():
            root.end_inner_backward()


def _leaves_of(inputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Iterable[Root]]:
    """``inputs`` of a backward, with the gathered parameters that computed in the place of sharded ones; their roots.

    Autograd knows of no other, and would leave sharded parameters without a gradient.
    """
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    places = live_roots.find(given)
    found = zip(places, given, strict=True)
    leaves = [leaf for place, tensor in found for leaf in ((tensor,) if place is None else place.leaves or (tensor,))]
    return leaves, dict.fromkeys(place.root for place in places if place is not None)
