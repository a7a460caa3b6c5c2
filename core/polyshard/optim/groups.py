"""Which parameters of a model go to which optimizer or parameter group, by their whole shapes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import nn

from ..errors import ConfigError, ConfigTypeError
from ..inspect import placement


class MatrixSplit(NamedTuple):
    """Trained parameters of a model, each once and in its order, in two lists."""

    matrices: list[nn.Parameter]
    """Weights of hidden layers with two dimensions, and stacks of them with three."""
    others: list[nn.Parameter]
    """Embeddings, vectors, and all that was left out."""


def for_matrices(
    model: nn.Module, *, leave_out: Collection[nn.Module] = (), stacks: Collection[nn.Module] = ()
) -> MatrixSplit:
    """The trained parameters of ``model``, sharded or not, for an optimizer of matrices and for another one.

    Matrices are parameters whose whole shape has two dimensions, but for those of ``nn.Embedding`` and
    ``nn.EmbeddingBag`` and of modules inside ``leave_out``: give the output head, which Muon's authors leave to AdamW.
    A weight that is tied to one of these is left out with it. So are parameters of three dimensions in the modules
    ``stacks``, which hold matrices along dimension 0: give experts. Elsewhere they may be something else (filters,
    embeddings of positions), and go to the others.

    Raises:
        ConfigTypeError: ``model`` is no module, or ``leave_out`` or ``stacks`` no modules.
        ConfigError: one of these is not inside ``model``.
    """
    refuse_strangers(model, leave_out, "for_matrices")
    refuse_strangers(model, stacks, "for_matrices", "stacks")
    stacked = {parameter for module in stacks for parameter in module.parameters()}
    excluded = {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module in leave_out
        for parameter in module.parameters()
    }
    split = MatrixSplit([], [])
    for parameter in model.parameters():
        if parameter.requires_grad:
            dims = len(placement(parameter).shape)
            is_matrix = parameter not in excluded and (dims == 2 or (dims == 3 and parameter in stacked))
            (split.matrices if is_matrix else split.others).append(parameter)
    return split


def refuse_strangers(model: nn.Module, modules: Collection[nn.Module], call: str, argument: str = "leave_out") -> None:
    """Raise where ``modules``, an ``argument`` of ``call``, are not modules inside of ``model``.

    Raises:
        ConfigTypeError: ``model`` is no module, or ``modules`` no modules.
        ConfigError: one of these is not inside ``model``.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"{call} takes a model, not a {type(model).__name__}.")
    if isinstance(modules, (nn.Module, str)) or not all(isinstance(each, nn.Module) for each in modules):
        raise ConfigTypeError(f"{argument} of {call} must be a list of modules, such as [model.head], not {modules!r}.")
    inside = set(model.modules())
    for each in modules:
        if each not in inside:
            raise ConfigError(f"{argument} of {call} has a {type(each).__name__} that is not inside the model.")


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
            decays = parameter not in excluded and len(placement(parameter).shape) >= 2
            (decaying if decays else others).append(parameter)
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
