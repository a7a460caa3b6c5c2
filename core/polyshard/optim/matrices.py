"""Which parameters of a model an optimizer for matrices takes, and which are left to another one."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from ..engine.surface.placement import placement_of


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
    """
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
