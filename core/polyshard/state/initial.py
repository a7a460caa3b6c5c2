"""State of optimizers that never stepped: what ``torch.distributed.checkpoint.load`` reads into has to be there.

[Note: the first state]
It is what torch's ``get_optimizer_state_dict`` makes, to the bit: that of a step with gradients of zeros and a learning
rate of zero. No parameter changes, and the state tells of one step. Torch's optimizer itself steps there, with hooks
and settings. Here a copy does, over the same parameters and into the same state, so that hooks do not hear of it,
settings stay as they are whatever happens, and nothing takes it for a step of the training.

As in torch, an optimizer is left alone once it has any state, or gradients that its next step will use.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, PolyshardError, UnsupportedError
from ..inspect import ShardedModel, copy_to_step, step_apart
from .exchange import numbers_of_all, speaks
from .sharded import Holding, holdings

#: Torch's stance is one for all threads.
_STANCE = threading.Lock()


def make_state(sharded: ShardedModel, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Give those of ``optimizers`` that never stepped the state of a step that changes nothing. Every rank calls it.

    Raises:
        ConfigError: one cannot step so, or holds what is not the model's. It has no state then, as before.
        UnsupportedError: it would keep what a state dict cannot hold.
    """
    for optimizer in optimizers:
        held = holdings(sharded, optimizer.param_groups)
        optimizer = _inner(optimizer)
        untouched = not optimizer.state and all(parameter.grad is None for parameter in held)
        if exchanges(optimizer):
            # It exchanges parts in each step, and of replicas some have no state: ranks decide together.
            if getattr(optimizer, "_plans", None) is None and speaks(sharded.collectives):
                untouched = all(each for each, *_ in numbers_of_all(sharded.collectives, [untouched]))
            elif speaks(sharded.collectives):
                untouched = False
        if untouched:
            _make(optimizer, held, sharded.rank)


def exchanges(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` brings whole tensors together, so that ranks keep the state of other parameters each."""
    return hasattr(type(optimizer), "keeps_at_owners")


def steps_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is around another one, which steps for it."""
    return any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The one inside of ``optimizer`` whose groups are all of its own; itself, where there is none."""
    inside = (each for each in vars(optimizer).values() if isinstance(each, torch.optim.Optimizer))
    return next((each for each in inside if each.param_groups is optimizer.param_groups), optimizer)


@contextmanager
def stepping_quickly(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``optimizer`` does not compile its step, which takes longer than one does, and draws what is drawn again.

    Not one that exchanges parts: ranks that are threads would wait for each other.
    """
    if exchanges(optimizer):
        yield
        return
    held = {each.device for group in optimizer.param_groups for each in group["params"]}
    devices = [each for each in held if each.type == "cuda"]
    with _STANCE, torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        yield


def _make(optimizer: torch.optim.Optimizer, held: Mapping[nn.Parameter, Holding], rank: int) -> None:
    name = type(optimizer).__name__
    if _needs_closure(optimizer):
        raise ConfigError(
            f"{name} never stepped, so that it has no state yet, and it steps by a closure alone: none can be made of "
            f"it (rank {rank}). Save and load the model without it, or call it behind its first step."
        )
    if steps_others(optimizer):
        raise ConfigError(
            f"{name} never stepped, so that it has no state yet, and it lets another optimizer step (rank {rank}). "
            "Give that one, or call it behind the first step."
        )
    # A rank without elements of a parameter gets no gradient of it in a backward either.
    trained = [each for each, holding in held.items() if each.requires_grad and holding.here]
    copied: Any = copy_to_step(optimizer, optimizer.state, [_still(group) for group in optimizer.param_groups])
    if exchanges(optimizer):
        copied._kept = {}
    try:
        with _gradients_of_zeros(trained), stepping_quickly(copied):
            step_apart(copied)
    except BaseException as error:
        optimizer.state.clear()
        if isinstance(error, PolyshardError) or not isinstance(error, Exception):
            raise
        raise ConfigError(
            f"{name} never stepped, so that it has no state yet, and a step with gradients of zeros, which would make "
            f"it, failed (rank {rank}): {type(error).__name__}: {error}. Save and load the model without it, or call "
            "it behind its first step."
        ) from error
    if getattr(copied, "keeps_at_owners", False):
        optimizer.state.clear()
        raise UnsupportedError(
            f"{name} keeps something of whole tensors on the ranks that own them (rank {rank}), which a state dict "
            "cannot hold yet. Save the model alone, and let the optimizer start anew."
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(each.default is inspect.Parameter.empty and each.kind in named for each in parameters)


def _still(group: Mapping[str, Any]) -> dict[str, Any]:
    """``group`` with a learning rate of zero."""
    # Some update parameters whatever the gradients are.
    if "lr" not in group:
        return {**group}
    return {**group, "lr": torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0}


@contextmanager
def _gradients_of_zeros(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, ``parameters``, which have no gradients, have some."""
    with torch.inference_mode(False), torch.no_grad():
        try:
            for each in parameters:
                each.grad = torch.zeros_like(each)
            yield
        finally:
            for each in parameters:
                each.grad = None
