"""What a rank has of a training: taken for the same rank of another job, and given to it, without files or gathers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.inspect import idle_model, is_dtensor, local_of, placed_as
from polyshard.preemption import own_state, restore_own_state
from torch import nn


class Stateful(Protocol):
    """A scheduler, a data loader, averages: what torch's own have."""

    def state_dict(self) -> dict[str, Any]:
        """What can be pickled."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on with it."""


class LocalState:
    """This rank's pieces of a model and its optimizers, random states, and what else the program named.

    Raises UnsupportedError: an optimizer keeps something of whole tensors on the ranks that own them.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], more: Mapping[str, Stateful]
    ) -> None:
        self._model, self._optimizers, self._more = model, tuple(optimizers), dict(more)
        for each in self._optimizers:
            if getattr(each, "keeps_at_owners", False):
                raise UnsupportedError(
                    f"{type(each).__name__} keeps something of whole tensors on the ranks that own them, which cannot "
                    "travel between jobs yet. Let it keep its state by elements, or take another optimizer."
                )

    def take(self) -> dict[str, Any]:
        """What ``give`` of the same rank takes over. Tensors that forwards leave alone are no copies."""
        sharded = idle_model(self._model, "Elastic.step()")
        device = sharded.collectives.device
        if device.type == "cuda":
            # Another thread sends it, on another stream.
            torch.cuda.synchronize(device)
        return {
            "parameters": {name: _local(each) for name, each in self._model.named_parameters()},
            "buffers": {name: _local(each).clone() for name, each in self._model.named_buffers()},
            "optimizers": [_taken_from(each) for each in self._optimizers],
            "random": own_state(device),
            "more": {name: copy.deepcopy(each.state_dict()) for name, each in self._more.items()},
        }

    def give(self, state: dict[str, Any]) -> None:
        """Take over ``state``. Raises ConfigError, changing nothing, where it is of another model or program."""
        sharded = idle_model(self._model, "Elastic.step()")
        device = sharded.collectives.device
        kinds = ("parameters", self._model.named_parameters()), ("buffers", self._model.named_buffers())
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for kind, own in kinds:
            here = {name: _local(each) for name, each in own}
            _require_alike(kind, _described(here), _described(state[kind]), sharded.rank)
            pairs += [(state[kind][name], each) for name, each in here.items()]
        groups = [[len(group["params"]) for group in each.param_groups] for each in self._optimizers]
        theirs = [[len(group["params"]) for group in each["groups"]] for each in state["optimizers"]]
        for what, mine, other in (
            ("optimizers", dict(enumerate(groups)), dict(enumerate(theirs))),
            ("states", dict.fromkeys(self._more), dict.fromkeys(state["more"])),
        ):
            _require_alike(what, mine, other, sharded.rank)
        sharded.copy_into_masters(*map(list, zip(*pairs, strict=True)))
        for optimizer, its in zip(self._optimizers, state["optimizers"], strict=True):
            _give_to(optimizer, its)
        for name, each in self._more.items():
            each.load_state_dict(state["more"][name])
        restore_own_state(state["random"], device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (local_of(tensor) if is_dtensor(tensor) else tensor).detach()


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tuple(each.shape)} {each.dtype}" for name, each in tensors.items()}


def _require_alike(what: str, mine: Mapping[Any, Any], theirs: Mapping[Any, Any], rank: int) -> None:
    if dict(mine) == dict(theirs):
        return
    name = next(key for key in {**mine, **theirs} if mine.get(key, ...) != theirs.get(key, ...))
    there, here = theirs.get(name, "missing"), mine.get(name, "missing")
    raise ConfigError(
        f"Another job has other {what} than this one (rank {rank}): {name!r} is {there} there and {here} here. Start "
        "all jobs from one program, with as many ranks each."
    )


def _taken_from(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    numbers = {each: index for index, each in enumerate(_parameters(optimizer))}
    groups = [
        {key: [numbers[each] for each in value] if key == "params" else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    placed: dict[int, dict[str, Any]] = {}
    plain: dict[int, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        number = numbers[parameter]
        placed[number] = {key: _local(value) for key, value in state.items() if is_dtensor(value)}
        plain[number] = {key: value for key, value in state.items() if not is_dtensor(value)}
    return {"groups": copy.deepcopy(groups), "placed": placed, "plain": plain}


def _give_to(optimizer: torch.optim.Optimizer, taken: Mapping[str, Any]) -> None:
    for group, theirs in zip(optimizer.param_groups, taken["groups"], strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for number, plain in taken["plain"].items():
        parameter = parameters[number]
        device = _local(parameter).device
        state = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in plain.items()}
        # What arrived lies in memory that must not be written to.
        for key, value in taken["placed"][number].items():
            state[key] = placed_as(parameter, value.to(device, copy=True))
        optimizer.state[parameter] = state


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
