"""Which parameters of a model an optimizer for matrices takes, and which are left to another one."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from ..errors import ConfigError, ConfigTypeError
from ..functions.lookup import placement_of


class MatrixSplit(NamedTuple):
    """Trained parameters of a model, each once and in its order, in two lists."""

    matrices: list[nn.Parameter]
    """Weights of hidden layers with two dimensions."""
    others: list[nn.Parameter]
    """Embeddings, vectors, and all that was left out."""


def for_matrices(model: nn.Module, *, leave_out: Collection[nn.Module] = ()) -> MatrixSplit:
    """The trained parameters of ``model``, sharded or not, for an optimizer of matrices and for another one.

    Matrices are parameters whose whole shape has two dimensions, but for those of ``nn.Embedding`` and
    ``nn.EmbeddingBag`` and of modules inside ``leave_out``: give the output head, which Muon's authors leave to AdamW.
    A weight that is tied to one of these is left out with it.

    Raises:
        ConfigTypeError: ``model`` is no module, or ``leave_out`` no modules.
        ConfigError: one of these is not inside ``model``.
    """
    refuse_strangers(model, leave_out, "for_matrices")
    excluded = {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module in leave_out
        for parameter in module.parameters()
    }
    split = MatrixSplit([], [])
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = parameter not in excluded and len(placement_of(parameter).shape) == 2
            (split.matrices if is_matrix else split.others).append(parameter)
    return split


def refuse_strangers(model: nn.Module, leave_out: Collection[nn.Module], call: str) -> None:
    """Raise where ``leave_out`` are not modules inside of ``model``; ``call`` is named in the error.

    Raises:
        ConfigTypeError: ``model`` is no module, or ``leave_out`` no modules.
        ConfigError: one of these is not inside ``model``.
    """
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"{call} takes a model, not a {type(model).__name__}.")
    if isinstance(leave_out, (nn.Module, str)) or not all(isinstance(each, nn.Module) for each in leave_out):
        raise ConfigTypeError(
            f"leave_out of {call} must be a list of modules, such as [model.head], not {leave_out!r}."
        )
    inside = set(model.modules())
    for each in leave_out:
        if each not in inside:
            raise ConfigError(f"leave_out of {call} has a {type(each).__name__} that is not inside the model.")
