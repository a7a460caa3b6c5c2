"""Which parameters of a model decay, as parameter groups of an optimizer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ..errors import ConfigError, ConfigTypeError
from ..functions.lookup import placement_of
from .matrices import refuse_strangers


def decay_groups(
    model: nn.Module, weight_decay: float, *, leave_out: Collection[nn.Module] = ()
) -> list[dict[str, Any]]:
    """The trained parameters of ``model``, sharded or not, as two parameter groups: those that decay, and the others.

    Parameters whose whole shape has two dimensions and more decay, but for those of modules in ``leave_out``; vectors
    (biases, norms) do not. A weight that is tied to a module that is left out is left out with it. A group that would
    be empty is not there. The answer is the same before and after sharding, and on every rank.

    Raises:
        ConfigTypeError: ``model`` is no module, or ``leave_out`` no modules.
        ConfigError: ``weight_decay`` is negative, or one of ``leave_out`` is not inside ``model``.
    """
    refuse_strangers(model, leave_out, "decay_groups")
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, (int, float)):
        raise ConfigTypeError(f"weight_decay of decay_groups must be a number, not {weight_decay!r}.")
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay of decay_groups must not be negative, but it is {weight_decay}.")
    excluded = {parameter for module in leave_out for parameter in module.parameters()}
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter not in excluded and len(placement_of(parameter).shape) >= 2
            (decaying if decays else others).append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
