"""Optimizers that step in the backward, over parameters in host memory."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ConfigError
from ..inspect import outermost_model
from .whole_tensors import WholeTensorOptimizer


def step_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, keeps_former: bool = False) -> None:
    """Let ``optimizer`` update units in host memory as soon as their gradients are there, beside the backward.

    For ``offload="optimizer"``. The loop stays as it is: ``optimizer.step()`` updates what is left, and is to be called
    behind each backward that reduces. Behind ``backward()``, parameters in host memory are those of the next step.
    Learning rates are those at the backward. Units on the device, parameters outside of units, units of which some
    parameter has no gradient on this rank, or a hook behind its accumulation, and all units where inner modules were
    called by themselves are updated by ``step()``.

    One backward that reduces belongs to each step: others of the step are inside of ``no_sync``. Between it and
    ``step()`` clipping, ``GradScaler``, a forward, a checkpoint and a changed learning rate come too late, and raise
    ``StateError``. With ``keeps_former`` they take the step back, which ``step()`` then makes: a norm that is below its
    limit, as in most steps, leaves it as it is. Closures raise ``StateError`` always.

    Args:
        model: The outermost sharded module.
        optimizer: Updates each parameter by itself, from its gradient and state, as torch's do. It steps here, and the
            one that was given before does no more; None for none.
        keeps_former: Whether parameters and state from before a step are kept: as much host memory again, and about
            twice the traffic there.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside of a step or ``unsharded``.
        ConfigError: none of the optimizer's parameters is offloaded, or by a manager that cannot let it step here; it
            needs all of a tensor; or precision scales the loss.
    """
    sharded = outermost_model(model, "step_in_backward()")
    sharded.refuse_inside_step("step_in_backward()")
    if optimizer is None:
        sharded.step_in_backward(None)
        return
    name, rank = type(optimizer).__name__, f"rank {sharded.rank}"
    if isinstance(optimizer, (WholeTensorOptimizer, torch.optim.LBFGS)):
        raise ConfigError(
            f"{name} cannot step in the backward ({rank}): it needs more than one rank's part of one unit. Leave "
            "step_in_backward() to the optimizer of other parameters."
        )
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    offloaded = [
        unit for unit in sharded.units if unit.offloaded and not held.isdisjoint((*unit.tensors, unit.flat_parameter))
    ]
    if not offloaded:
        raise ConfigError(
            f"{name} holds no offloaded parameter ({rank}): nothing would step in the backward. "
            "Shard with offload='optimizer', and make the optimizer behind that."
        )
    for unit in offloaded:
        capabilities = unit.offload.capabilities
        if not (capabilities.keeps_values and capabilities.awaits_gradients):
            raise ConfigError(
                f"{type(unit.offload).__name__} offloads '{unit.name}', and gathers of a backward may read the master "
                f"that {name} steps over ({rank}). Shard with offload='optimizer', or inner='optimizer' of 'partial'."
            )
        if unit.precision.capabilities.loss_scaling:
            raise ConfigError(
                f"{type(unit.precision).__name__} of '{unit.name}' needs a scaled loss, and {name} would step with "
                f"scaled gradients ({rank}). Train in bf16, or do without step_in_backward()."
            )
    sharded.step_in_backward(optimizer, keeps_former=keeps_former)
