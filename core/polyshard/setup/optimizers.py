"""Optimizers that were made before the model was sharded, and go on with the parameters that sharding made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..errors import ConfigError
from ..functions.optimizers import NOT_BY_ELEMENT
from ..functions.whole import own_rows_of
from ..planning.parts import is_dtensor, local_of
from ..planning.plan import ManagedParameter
from ..planning.units import PlannedModule
from ..runtime.placed import PlacedUnit
from ..runtime.root import Root


def refuse_unknown(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rank: int) -> None:
    """Raise ConfigError for an optimizer that holds no parameter of ``model``, or has state of which it is not known
    what each rank needs."""
    # Walks over all modules take long.
    names = {parameter: name for name, parameter in model.named_parameters()} if optimizers else {}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in names]
        if not held:
            raise ConfigError(
                f"{type(optimizer).__name__} holds no parameter of this {type(model).__name__} (rank {rank}). Make it "
                "from model.parameters(), after anything that copies the model, and before the sharding that is to "
                "take it over."
            )
        for parameter in held:
            for name, value in optimizer.state.get(parameter, {}).items():
                if not _is_known(name, value, parameter):
                    shape = f" {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
                    raise ConfigError(
                        f"{type(optimizer).__name__} has '{name}' of '{names[parameter]}', {type(value).__name__}"
                        f"{shape}, and it is not known what of it each rank needs (rank {rank}). Make a new optimizer "
                        "behind the sharding, and load its state with polyshard.checkpoint."
                    )


def held_of(modules: Iterable[PlannedModule]) -> Mapping[nn.Parameter, ManagedParameter]:
    """The parameters of ``modules``, by the objects that the user holds of them before they are sharded."""
    found = [parameter for planned in modules for _, parameter in planned.placed_parameters]
    return {cast("nn.Parameter", module._parameters[key]): each for each in found for module, key in each.sites[:1]}


def take_over(
    root: Root, optimizers: Sequence[torch.optim.Optimizer], held: Mapping[nn.Parameter, ManagedParameter]
) -> None:
    """Let ``optimizers`` hold what became of the parameters ``held``, and of their state this rank's rows."""
    located = {each: (unit, index) for unit in root.units for index, each in enumerate(unit.parameters)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for number, before in enumerate(group["params"]):
                if before not in held:
                    continue
                unit, index = located[held[before]]
                after = group["params"][number] = held[before].original
                if before in optimizer.state:
                    assert isinstance(unit, PlacedUnit)
                    optimizer.state[after] = {
                        name: _cut(unit, index, value) if _is_by_element(name, value, before) else value
                        for name, value in optimizer.state.pop(before).items()
                    }


def _is_by_element(name: str, value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and name not in NOT_BY_ELEMENT


def _is_known(name: str, value: Any, parameter: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return value is None or isinstance(value, bool | int | float | str)
    if not _is_by_element(name, value, parameter):
        return value.ndim == 0
    if is_dtensor(parameter) and is_dtensor(value):
        own: Any = value
        cut: Any = parameter
        return bool(own.placements == cut.placements and own.device_mesh == cut.device_mesh)
    return type(value) is torch.Tensor and type(parameter) in (torch.Tensor, nn.Parameter)


@torch.no_grad()
def _cut(unit: PlacedUnit, index: int, value: torch.Tensor) -> torch.Tensor:
    """This rank's rows of ``value``, as the parameter lies."""
    from torch.distributed.tensor import DTensor

    held: Any = unit.parameters[index].original
    own = own_rows_of(unit, index, local_of(value) if is_dtensor(value) else value).to(unit.held.locals[index].device)
    return DTensor.from_local(
        own, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
