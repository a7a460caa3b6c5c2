"""Which parameters of a model go to an optimizer of matrices."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from ..errors import ConfigError, ConfigTypeError


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
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"for_matrices takes a model, not a {type(model).__name__}.")
    _refuse_strangers(model, leave_out, "leave_out")
    _refuse_strangers(model, stacks, "stacks")
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
            dims = parameter.ndim
            is_matrix = parameter not in excluded and (dims == 2 or (dims == 3 and parameter in stacked))
            (split.matrices if is_matrix else split.others).append(parameter)
    return split


def _refuse_strangers(model: nn.Module, modules: Collection[nn.Module], argument: str) -> None:
    if isinstance(modules, (nn.Module, str)) or not all(isinstance(each, nn.Module) for each in modules):
        raise ConfigTypeError(
            f"{argument} of for_matrices must be a list of modules, such as [model.head], not {modules!r}."
        )
    inside = set(model.modules())
    for each in modules:
        if each not in inside:
            raise ConfigError(f"{argument} of for_matrices has a {type(each).__name__} that is not inside the model.")
