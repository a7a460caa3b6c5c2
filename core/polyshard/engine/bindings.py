"""Which tensor stands under a parameter's name: the original, or the view that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _torch_private

if TYPE_CHECKING:
    from .unit import ManagedParameter


class Bindings:
    """Puts a unit's views in the place of its parameters, and the parameters back.

    Plain dict updates, one a module: ``nn.Module.__setattr__`` would cost a microsecond a parameter and refuse tensors
    that are no ``nn.Parameter``.
    """

    def __init__(self, parameters: Sequence[ManagedParameter], leaves: Sequence[torch.Tensor]) -> None:
        #: (``module._parameters``, attribute, original) of each parameter's first site.
        self.watched: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self.installed = False
        views: dict[nn.Module, dict[str, Any]] = {}
        originals: dict[nn.Module, dict[str, Any]] = {}
        for parameter, leaf in zip(parameters, leaves, strict=True):
            first, key = parameter.sites[0]
            self.watched.append((first._parameters, key, parameter.original))
            if leaf is parameter.original:
                continue
            for module, attribute in parameter.sites:
                views.setdefault(module, {})[attribute] = leaf
                originals.setdefault(module, {})[attribute] = parameter.original
        self._swaps: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
            (module._parameters, views[module], originals[module]) for module in views
        ]
        for module in views:
            if isinstance(module, nn.RNNBase):
                self._swaps.append(_flat_weights_swap(module, views[module]))

    def install(self) -> None:
        """Let modules see the views."""
        if not self.installed:
            for target, views, _ in self._swaps:
                target.update(views)
            self.installed = True

    def restore(self) -> None:
        """Let modules see the originals."""
        if self.installed:
            for target, _, originals in self._swaps:
                target.update(originals)
            self.installed = False


def _flat_weights_swap(
    module: nn.RNNBase, views: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    # RNN modules compute from a list of their weights that they keep beside _parameters.
    names = _torch_private.rnn_weight_names(module)
    originals = list(module._flat_weights)
    swapped = [views.get(name, original) for name, original in zip(names, originals, strict=True)]
    return module.__dict__, {"_flat_weights": swapped}, {"_flat_weights": originals}
