"""State dicts of optimizers: what has a parameter's shape as ``DTensor``, over this rank's piece of it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from polyshard.extension import Unit, live_roots
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ._placed import as_dtensor, is_placed, piece_of

_installing = threading.Lock()
_known: list[WeakSet[torch.optim.Optimizer]] = []


def answer_optimizers() -> None:
    """Meet every optimizer at its first step, from now on: by then it has parameters, and from then on a state."""
    with _installing:
        if not _known:
            _known.append(WeakSet())
            register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _known[0]:
        return
    _known[0].add(optimizer)
    if any(unit is not None for unit in _units_of(optimizer)):
        optimizer.register_state_dict_post_hook(_after_save)
        optimizer.register_load_state_dict_pre_hook(_before_load)


def _units_of(optimizer: torch.optim.Optimizer) -> list[Unit | None]:
    """The unit of each parameter, in the order by which state dicts number them; None for others."""
    parameters = _parameters(optimizer)
    units = [found.unit if found is not None else None for found in live_roots.find(parameters)]
    return [unit if unit is not None and is_placed(unit) else None for unit in units]


def _parameters(optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _after_save(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    for number, (unit, parameter) in enumerate(zip(_units_of(optimizer), _parameters(optimizer), strict=True)):
        if unit is not None and number in states:
            # The optimizer's own dict stays as it is.
            states[number] = {
                key: as_dtensor(unit, value) if _is_piece(value, parameter.shape) else value
                for key, value in states[number].items()
            }
    return {**state_dict, "state": states}


def _before_load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = dict(state_dict["state"])
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, unit in zip(saved, _units_of(optimizer), strict=False):
        if unit is not None and number in states:
            whole = unit.layout.slots[0].shape
            states[number] = {
                key: piece_of(unit, value, f"load_state_dict(): {key} of '{unit.parameters[0].names[0]}'")
                if _is_piece(value, whole)
                else value
                for key, value in states[number].items()
            }
    return {**state_dict, "state": states}


def _is_piece(value: object, shape: Sequence[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and tuple(value.shape) == tuple(shape)
