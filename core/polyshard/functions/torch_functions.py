"""What follows sharded models from torch's own functions: optimizers' steps, checkpointed functions, backwards.

[Note: torch's functions]
Parameters are ``DTensor``, for which torch's functions are right. Two must tell of themselves:
``torch.utils.checkpoint.checkpoint``, of forwards that run again in backward, and ``torch.autograd.backward``, of its
end, where a module's forward has not returned. Programs have imported these names long before a model is sharded. So
the first ``shard()`` exchanges the functions behind the names, once in a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _torch_private
from ..runtime.activation_checkpoint import Checkpointed
from ..runtime.live_roots import live_roots
from ..runtime.root import Root
from ..runtime.unit import Unit
from .optimizers import OptimizerCheck
from .whole import load_whole_values

_installing = threading.Lock()
_checks: list[OptimizerCheck] = []
_loading: WeakSet[Unit] = WeakSet()


def follow(root: Root) -> None:
    """Let torch's functions and optimizers find the parameters of ``root``; let its modules load whole values."""
    with _installing:
        if not _checks:
            _install()
        _checks[0].forget()
        live_roots.add(root)
        # Modules that become part of a larger model have their load hooks.
        new = [unit for unit in root.units if unit not in _loading]
        _loading.update(new)
    load_whole_values(new)


def _install() -> None:
    _follow_inner_backwards()
    _follow_checkpoints()
    check = OptimizerCheck(live_roots)
    register_optimizer_step_pre_hook(check.before_step)
    _checks.append(check)


@contextmanager
def replacing_values(root: Root, context: str, values: str) -> Iterator[None]:
    """Inside of ``context``, masters of ``root`` hold other ``values``: steps and backwards of it raise."""
    before, root.replaced = root.replaced, (context, values)
    # Optimizers that were let through are looked at again. Nobody looks where ``shard`` was never called: FSDP's face.
    for check in _checks:
        check.forget()
    try:
        yield
    finally:
        root.replaced = before


def _follow_checkpoints() -> None:
    # A module cannot see that its forward runs under a checkpoint, and ranks have to know ([Note: recomputation]).

    def called(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        # None means True to torch.
        known = Checkpointed(function, use_reentrant is None or bool(use_reentrant))
        return before(known, *args, use_reentrant=use_reentrant, **kwargs)

    before = _torch_private.exchange_behind(torch.utils.checkpoint.checkpoint, called)


def _follow_inner_backwards() -> None:
    # Backwards inside of a forward: ``loss.backward()`` in a ``training_step``, or a block's own loss. A module state
    # notices a backward at the tensors that its forward returned, and a module that has not returned has none. A hook
    # on every parameter would notice, and cost more than the rest of a step's Python.

    def called(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            hidden(*args, **kwargs)
            return
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _leaves_of(kwargs["inputs"])
        try:
            before(*args, **kwargs)
        except Exception as error:
            for reference in live_roots.references:
                root = reference()
                if root is not None:
                    root.tell_failed_backward(error)
            raise
        for reference in live_roots.references:
            root = reference()
            # A backward inside of another one ends with that.
            if root is not None and root.active is not None and not _torch_private.in_backward():
                root.end_inner_backward()

    hidden = _torch_private.hidden_from_compile(called)
    before = _torch_private.exchange_body(torch.autograd.backward, called)


def _leaves_of(inputs: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``inputs`` of a backward, with the gathered parameters that computed in the place of sharded ones.

    Autograd knows of no other, and would leave sharded parameters without a gradient.
    """
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    found = zip(live_roots.find(given), given, strict=True)
    return [leaf for place, tensor in found for leaf in ((tensor,) if place is None else place.leaves or (tensor,))]
