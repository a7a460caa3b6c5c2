"""What a checkpoint of a sharded model holds, under the names that the unsharded model has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.layout import Piece, Slot
from ..engine.phase import Phase
from ..engine.plan import STAGE_ATTRIBUTE
from ..engine.root import Root
from ..errors import ConfigError, StateError
from .sharded import CheckpointTensor, of_piece, whole


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
    module = root.stages[0].module
    for name, parameter in module.named_parameters():
        if id(parameter) not in managed:
            state[name] = parameter.detach()
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            state[name] = buffer.detach()
    return state


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter name: ``{"state": {name: {key: value}}, "param_groups": [...]}``.

    The form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, so that an unsharded model loads
    it too. Tensors of the parameter's local shape are ``CheckpointTensor`` of the whole parameter's; scalars are as
    they are. In ``param_groups``, ``params`` are names.

    Raises:
        StateError: as ``model_state``.
        ConfigError: the optimizer holds a parameter that is not the model's, or state that no other number of ranks
            could take over.
    """
    root = resting_root(model, "optimizer_state()")
    known = {id(place.parameter): place for place in places(root)}
    names = parameter_names(root, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for parameter, name in names.items():
        values = optimizer.state.get(parameter)
        if values:
            place = known.get(id(parameter))
            state[name] = {key: _entry(name, key, value, place, root.rank) for key, value in values.items()}
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


@dataclass(frozen=True, slots=True)
class Place:
    """A sharded parameter, and the part of it that this rank holds."""

    name: str
    """Its first fully-qualified name."""
    parameter: nn.Parameter
    """The user's own object: 1-D elements of this rank, or the whole parameter where the unit is not cut."""
    slot: Slot
    piece: Piece | None
    """The elements of this rank; None for none."""
    cut: bool
    """Whether the unit is cut at all."""

    def value(self) -> CheckpointTensor:
        """The parameter itself."""
        return self.shaped(self.parameter)

    def shaped(self, local: torch.Tensor) -> CheckpointTensor:
        """``local``, of the local parameter's shape, as this rank's part of a tensor of the whole one's."""
        return of_piece(self.slot, self.piece, local.detach()) if self.cut else whole(local)


def places(root: Root) -> Iterator[Place]:
    """Every sharded parameter."""
    for unit in root.units:
        pieces = {piece.slot: piece for piece in unit.pieces}
        for index, (parameter, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True)):
            yield Place(
                parameter.names[0], parameter.original, slot, pieces.get(index), cut=unit.grid.shard is not None
            )


def parameter_names(root: Root, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The name of each of the optimizer's parameters, in its order.

    Raises:
        ConfigError: one is not the model's.
    """
    names = {id(parameter): name for name, parameter in root.stages[0].module.named_parameters()}
    names.update({id(place.parameter): place.name for place in places(root)})
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ConfigError(
                    f"Parameter {position} of the optimizer's group {index}, of shape {tuple(parameter.shape)}, is not "
                    f"a parameter of the model (rank {root.rank}). Pass the optimizer that was made from this model's "
                    "parameters."
                )
            found[parameter] = names[id(parameter)]
    return found


def resting_root(model: nn.Module, call: str) -> Root:
    """What the units of ``model`` share, with changes that the user made to parameters taken up.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
    """
    module = model
    # The wrapper holds the sharded module.
    if STAGE_ATTRIBUTE not in module.__dict__ and isinstance(model._modules.get("module"), nn.Module):
        module = model.get_submodule("module")
    stage = module.__dict__.get(STAGE_ATTRIBUTE)
    if stage is None:
        raise StateError(
            f"{call} needs a sharded model, but this {type(model).__name__} is not sharded. "
            "Pass the module that was given to polyshard.shard or fully_shard."
        )
    root: Root = stage.root
    if root.stages[0] is not stage:
        raise StateError(
            f"{call} needs the outermost sharded module, but '{stage.name}' lies inside "
            f"{type(root.stages[0].module).__name__} (rank {root.rank}). Pass that."
        )
    if root.phase is not Phase.IDLE:
        raise StateError(
            f"{call} was called inside a {root.phase.value} of the model (rank {root.rank}). Call it between steps."
        )
    if root.unsharded:
        raise StateError(f"{call} was called inside polyshard.unsharded() (rank {root.rank}). Leave the context first.")
    for unit in root.units:
        unit.take_up_changes()
    return root


def _managed(root: Root) -> Iterator[nn.Parameter]:
    for unit in root.units:
        for parameter in unit.parameters:
            yield parameter.original


def _entry(name: str, key: str, value: Any, place: Place | None, rank: int) -> Any:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(
            f"The optimizer's state '{key}' of '{name}' is a {type(value).__name__} (rank {rank}), of which it cannot "
            "be told how it is sharded. Use an optimizer whose state is tensors and numbers."
        )
    if not isinstance(value, torch.Tensor):
        return value
    if place is None or value.ndim == 0:
        return value.detach()
    if value.shape == place.parameter.shape:
        return place.shaped(value)
    if place.cut and value.numel() != 1:
        raise ConfigError(
            f"The optimizer's state '{key}' of '{name}' has shape {tuple(value.shape)} on rank {rank}: neither a "
            f"scalar nor the shard's shape {tuple(place.parameter.shape)}, so it means nothing to other ranks. Use an "
            "optimizer whose state has the parameter's shape."
        )
    return value.detach()
