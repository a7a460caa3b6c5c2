"""State of a sharded model and its optimizers as Lightning saves it without shards: whole tensors, in one file.

``polyshard.state`` puts tensors together and takes them apart, by name. Lightning's file has a model as its
``state_dict()`` orders it, and an optimizer's state by number: what is here turns one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ConfigError, UnsupportedError
from ..functions.whole import state_dicts_of_pieces
from ..state import (
    CheckpointTensor,
    StateForm,
    StateOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

_WHOLE = StateOptions(form=StateForm.FULL_ON_RANK_0)
_NAMES = ("params", "param_names")


def whole_model_state(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` of the unsharded model, in host memory, on rank 0; empty on others. Every rank calls it.

    What is in it beside parameters and buffers, as extra state and metrics, is rank 0's.

    Raises:
        UnsupportedError: the state dict does not have the parameters under their names, or ranks are pretended.
    """
    shown, cut = require_names(module)
    whole = get_model_state_dict(module, _WHOLE)
    if not whole:
        return {}
    return {name: whole[name] if name in cut else _on_host(value) for name, value in shown.items()}


def require_names(module: nn.Module) -> tuple[Mapping[str, Any], Set[str]]:
    """``module.state_dict()`` with this rank's pieces, and the names in it of what is sharded.

    Raises:
        UnsupportedError: as ``whole_model_state``.
    """
    with state_dicts_of_pieces():
        shown = module.state_dict()
    cut = {name for name, value in get_model_state_dict(module).items() if isinstance(value, CheckpointTensor)}
    missing = min(cut - shown.keys(), default=None)
    if missing is not None:
        raise UnsupportedError(
            f"state_dict() of {type(module).__name__} has no '{missing}': a hook changed its names, so that its "
            f"parameters cannot be told (rank {dist.get_rank()}). Save with state_dict_type='sharded'."
        )
    return shown, cut


def whole_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` of the unsharded model, in host memory, on rank 0; empty on others.

    Every rank calls it. A flat parameter appears as the parameters that it stands for, in the model's order.

    Raises:
        UnsupportedError: as ``whole_model_state``.
        ConfigError: as ``polyshard.state.get_optimizer_state_dict``.
    """
    whole = get_optimizer_state_dict(module, optimizer, _WHOLE)
    if not whole:
        return {}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, names in zip(whole["param_groups"], _names_by_group(module, optimizer), strict=True):
        numbers = range(number, number + len(names))
        number += len(names)
        own = zip(numbers, names, strict=True)
        state.update({index: whole["state"][name] for index, name in own if name in whole["state"]})
        groups.append({**_settings(group), "params": list(numbers)})
    return {"state": state, "param_groups": groups}


def load_whole_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Take this rank's part of whole tensors, by ``load_state_dict``: its hooks and what modules add see the file.

    Raises:
        ConfigError: the state is of another model.
    """
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        told = str(error).rstrip(" .")
        raise ConfigError(
            f"The checkpoint is not of a {type(module).__name__} as it is here: {told}. Load it into the model that it "
            "was saved from."
        ) from error


def load_whole_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of what ``optimizer.state_dict()`` of the unsharded model is. Every rank calls it.

    Its parameters may be numbers or names.

    Raises:
        ConfigError: the state is of another model or optimizer; nothing was changed.
        RankMismatchError: another rank failed.
    """
    by_group = _names_by_group(module, optimizer)
    counts = [len(names) for names in by_group]
    saved = [list(group["params"]) for group in state["param_groups"]]
    if counts != [len(keys) for keys in saved]:
        raise ConfigError(
            f"The checkpoint's optimizer has groups of {[len(keys) for keys in saved]} parameters, and "
            f"{type(optimizer).__name__} of {counts} (rank {dist.get_rank()}). Make the optimizer as it was when it "
            "was saved."
        )
    name_of = {
        key: key if isinstance(key, str) else name
        for keys, names in zip(saved, by_group, strict=True)
        for key, name in zip(keys, names, strict=True)
    }
    by_name = {
        "state": {name_of[key]: own for key, own in state["state"].items()},
        "param_groups": [
            {**_switches(own), **_settings(group), "params": [name_of[key] for key in keys]}
            for own, group, keys in zip(optimizer.param_groups, state["param_groups"], saved, strict=True)
        ],
    }
    set_optimizer_state_dict(module, optimizer, by_name)


def _names_by_group(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """What each group holds, in the order in which an optimizer of the unsharded model would."""
    order = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    by_group = [list(group["params"]) for group in get_optimizer_state_dict(module, optimizer)["param_groups"]]
    for names, group in zip(by_group, optimizer.param_groups, strict=True):
        # Flat parameters: units need not be in the model's order.
        if len(names) != len(group["params"]):
            names.sort(key=order.__getitem__)
    return by_group


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NAMES}


def _switches(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is on or off. Files of an earlier torch lack what later ones have added, as torch's own loading allows."""
    return {name: value for name, value in _settings(group).items() if value is None or isinstance(value, bool)}


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
