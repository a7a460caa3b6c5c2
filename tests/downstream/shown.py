"""What a rank shows of its training: tensors as this rank has them, with where each lies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def tensor(value: torch.Tensor) -> Any:
    """A tensor's own elements; of a ``DTensor`` its whole shape and placements as well."""
    value = value.detach()
    if not isinstance(value, DTensor):
        return value.cpu().clone()
    return [
        list(value.shape),
        str(value.placements),
        str(value.device_mesh.mesh_dim_names),
        value.to_local().cpu().clone(),
    ]


def parameters(model: nn.Module) -> dict[str, Any]:
    """Each parameter, by its name. Fails where another engine shards the model than was asked for."""
    modules = {kind.__module__.partition(".")[0] for each in model.modules() for kind in type(each).__mro__}
    moved = any(name.startswith("polyshard_fsdp") for name in modules)
    assert moved == (os.environ["ENGINE"] == "polyshard"), modules
    return {name: tensor(value) for name, value in model.named_parameters()}


def states(optimizers: Iterable[torch.optim.Optimizer]) -> list[Any]:
    """The state of each parameter, in the order of the optimizers' groups."""
    return [
        {
            name: tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in optimizer.state[each].items()
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    ]
