"""The tensors under a unit's parameter names: the originals, the views that compute, or stand-ins."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..planning.plan import ManagedParameter


class Shown(enum.Enum):
    """The tensors that modules see under their parameters' names."""

    ORIGINALS = "originals"
    """The user's own parameters: shards, outside of compute."""
    VIEWS = "views"
    """Whole parameters in compute dtype, during the unit's own compute."""
    GUARDS = "guards"
    """While another unit's forward runs: stand-ins that refuse to compute or, of a split module, the user's own, which
    are gathered where a module's attribute is read (``LazyParameters``)."""

    # Several look-ups a unit in each step; that of ``Enum`` is in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Swap:
    """The tensors of one module's names, for each state."""

    target: dict[str, Any]
    """The dict in which the module looks names up."""
    of: dict[Shown, dict[str, Any]]


class Bindings:
    """Puts a unit's views in the place of its parameters, and the parameters back.

    Plain assignments to the modules' dicts: ``nn.Module.__setattr__`` would cost a microsecond a parameter and refuse
    tensors that are no ``nn.Parameter``, and an update a module costs more than an assignment a parameter.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        leaves: Sequence[torch.Tensor],
        *,
        elsewhere: Shown,
        beside: Sequence[Swap] = (),
    ) -> None:
        """``elsewhere``: what other modules' forwards see; ``beside``: what else modules find in each state."""
        self.shown = Shown.ORIGINALS
        self.elsewhere = elsewhere
        self._beside = beside
        self._parameters = tuple(parameters)
        self._swaps = self._collect(leaves)
        self._updates: dict[Shown, list[tuple[dict[str, Any], str, Any]]] = {}

    def _collect(self, leaves: Sequence[torch.Tensor]) -> dict[nn.Module, Swap]:
        swaps: dict[nn.Module, Swap] = {}
        for parameter, leaf in zip(self._parameters, leaves, strict=True):
            if leaf is parameter.original:
                continue
            for module, attribute in parameter.sites:
                swap = swaps.setdefault(module, Swap(module._parameters, {shown: {} for shown in Shown}))
                swap.of[Shown.ORIGINALS][attribute] = swap.of[Shown.GUARDS][attribute] = parameter.original
                swap.of[Shown.VIEWS][attribute] = leaf
        return swaps

    def show(self, shown: Shown) -> None:
        """Let modules see ``shown``. Views must be attached by then."""
        if self.shown is not shown:
            if not self._updates:
                self._prepare()
            for target, name, tensor in self._updates[shown]:
                target[name] = tensor
            self.shown = shown

    def _prepare(self) -> None:
        # At first use, which is in the first forward: sharding a model is then as fast as it can be.
        swaps = [*self._swaps.values(), *self._beside]
        for module, swap in self._swaps.items():
            if isinstance(module, nn.RNNBase):
                weights = {shown: _torch_private.rnn_weights(module, values) for shown, values in swap.of.items()}
                swaps.append(Swap(module.__dict__, weights))
        self._updates = {
            shown: [(swap.target, name, value) for swap in swaps for name, value in swap.of[shown].items()]
            for shown in Shown
        }


class LazyParameters(dict[str, Any]):
    """``_parameters`` of a module in a split module: reading an attribute in another module's forward gathers it."""

    #: Lets modules see whole parameters, called with the name of the one that is read; None where they do or need not.
    gather: Callable[[str], None] | None = None

    @override
    def __getitem__(self, name: str) -> Any:
        if self.gather is not None:
            # The compiler may trace this call, or run it and compile its callees: it sees collectives in neither case.
            (_uncompiled if _torch_private.may_compile() else _call)(self.gather, name)
        return super().__getitem__(name)


def lazily(modules: Iterable[nn.Module], gather: Callable[[nn.Module, str], None]) -> list[Swap]:
    """What lets ``modules``, which are in a split module, call ``gather`` where others read their parameters."""
    return [
        Swap(
            vars(module._parameters),
            {shown: {"gather": partial(gather, module) if shown is Shown.GUARDS else None} for shown in Shown},
        )
        for module in dict.fromkeys(modules)
    ]


def _call(gather: Callable[[str], None], name: str) -> None:
    gather(name)


_uncompiled = _torch_private.hidden_from_compile(_call)
