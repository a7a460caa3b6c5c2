"""The state of a sharded model and its optimizer as objects, under the names that the unsharded model has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, UnsupportedError
from ..functions.whole import state_dicts_of_pieces
from ..runtime.root import Root
from .optimizers import Joint, Optimizers
from .places import Holding, holdings, places
from .resting import resting_root


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by fully-qualified name, for ``torch.distributed.checkpoint``.

    Sharded parameters are ``CheckpointTensor`` of the whole parameter's shape over this rank's memory: saving copies
    one chunk at a time, loading writes the shards in place. Parameters that are not sharded, and buffers, are plain
    tensors. What has several names is there once, under the first of ``named_parameters()`` or ``named_buffers()``.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
    """
    root = resting_root(model, "model_state()")
    state: dict[str, Any] = {place.name: place.value() for place in places(root)}
    managed = {id(parameter) for parameter in _managed(root)}
    module = root.module_states[0].module
    for name, parameter in module.named_parameters():
        if id(parameter) not in managed:
            state[name] = parameter.detach()
    persistent = _state_dict_names(module)
    for name, buffer in module.named_buffers():
        if name in persistent:
            state[name] = buffer.detach()
    return state


def optimizer_state(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """The optimizer's state by parameter name: ``{"state": {name: {key: value}}, "param_groups": [...]}``.

    The form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, so that an unsharded model loads
    it too. Tensors of the parameter's local shape are ``CheckpointTensor`` of the whole parameter's; scalars are as
    they are. In ``param_groups``, ``params`` are names. A parameter of ``polyshard.flat_parameters`` appears as the
    parameters that it stands for: its tensors are cut into theirs, its scalars are each one's. Several optimizers
    appear as one, with their groups in order.

    Raises:
        StateError: as ``model_state``.
        ConfigError: the optimizer holds a parameter that is not the model's, a unit's flat parameter and its own ones
            together, or state that no other number of ranks could take over.
    """
    root = resting_root(model, "optimizer_state()")
    joint = Joint(optimizer)
    held = holdings(root, joint.groups)
    for each in joint.members:
        if getattr(each, "keeps_at_owners", False):
            raise UnsupportedError(
                f"{type(each).__name__} keeps something of whole tensors on the ranks that own them (rank "
                f"{root.rank}), which a checkpoint cannot hold yet. Save the model alone, and let the optimizer start "
                "anew."
            )
        # Of several replicas one keeps the state of a piece, where they share the work.
        getattr(each, "drop_outdated_state", bool)()
    state: dict[str, dict[str, Any]] = {}
    for parameter, holding in held.items():
        for key, value in joint.state_of(parameter).items():
            for name, told in _entries(holding, key, value, root.rank).items():
                state.setdefault(name, {})[key] = told
    groups = []
    for group in joint.groups:
        names = [name for parameter in group["params"] for name in held[parameter].names]
        entry: dict[str, Any] = {**group, "params": names}
        if "param_names" in group:
            entry["param_names"] = list(names)
        groups.append(entry)
    return {"state": state, "param_groups": groups}


def in_order(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """What ``model_state`` gave, under all names of a parameter or buffer, as ``model.state_dict()`` orders them."""
    module = resting_root(model, "in_order()").module_states[0].module
    names = names_of(model)
    named = {name: value for first, value in state.items() for name in names.get(first, (first,))}
    known = [name for name in _state_dict_names(module) if name in named]
    return {name: named[name] for name in dict.fromkeys((*known, *named))}


def names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer, by the one under which ``model_state`` has it."""
    module = resting_root(model, "names_of()").module_states[0].module
    found: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values()}


def frozen_names(model: nn.Module) -> set[str]:
    """First names of the parameters that need no gradient."""
    module = resting_root(model, "frozen_names()").module_states[0].module
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


def _state_dict_names(module: nn.Module) -> Collection[str]:
    with state_dicts_of_pieces():
        return module.state_dict().keys()


def _managed(root: Root) -> Iterator[nn.Parameter]:
    for unit in root.units:
        for parameter in unit.parameters:
            yield parameter.original


def _entries(holding: Holding, key: str, value: Any, rank: int) -> dict[str, Any]:
    """The state ``key`` of each parameter that ``holding`` stands for, by name."""
    require_entry(holding, key, value, rank)
    if not isinstance(value, torch.Tensor):
        return dict.fromkeys(holding.here, value)
    if holding.places and value.ndim > 0 and value.shape == holding.parameter.shape:
        return dict(holding.parts(value))
    return dict.fromkeys(holding.here, value.detach())


def require_entry(holding: Holding, key: str, value: Any, rank: int) -> None:
    """Refuse state of a parameter that no other number of ranks could take over.

    Raises:
        ConfigError: naming the state ``key``, and the parameter that ``holding`` is about.
    """
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(
            f"The optimizer's state '{key}' of {holding.described} is a {type(value).__name__} (rank {rank}), of which "
            "it cannot be told how it is sharded. Use an optimizer whose state is tensors and numbers."
        )
    if isinstance(value, torch.Tensor) and holding.places and value.ndim > 0:
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise ConfigError(
                f"The optimizer's state '{key}' of {holding.described} is a {type(value).__name__} (rank {rank}), of "
                "which it cannot be told where its elements lie. Save the model without this optimizer, and the "
                "optimizer's state_dict() of each rank beside it."
            )
        if holding.partial and value.numel() != 1 and value.shape != holding.parameter.shape:
            raise ConfigError(
                f"The optimizer's state '{key}' of {holding.described} has shape {tuple(value.shape)} on rank {rank}: "
                f"neither a scalar nor the shard's shape {tuple(holding.parameter.shape)}, so it means nothing to "
                "other ranks. Use an optimizer whose state has the parameter's shape, or save the model without it, "
                "and the optimizer's state_dict() of each rank beside it."
            )
