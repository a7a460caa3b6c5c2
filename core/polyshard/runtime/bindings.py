"""The tensors under a unit's parameter names: the originals, the views that compute, or stand-ins.

Other modules' forwards see a ``LazyParameter`` of a split module, which gathers the parameter when something computes
with it. Nearly always that happens where another module reads an attribute, and it gets the parameter at once
(``LazyParameters``). References kept from an earlier forward, and ``head.parameters()``, go around attributes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..nested import map_tensors
from ..planning.plan import ManagedParameter


class Shown(enum.Enum):
    """The tensors that modules see under their parameters' names."""

    ORIGINALS = "originals"
    """The user's own parameters: shards, outside of compute."""
    VIEWS = "views"
    """Whole parameters in compute dtype, during the unit's own compute."""
    GUARDS = "guards"
    """Stand-ins while another unit's forward runs: they refuse to compute or, of a split module, gather."""

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
        stand_in: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
        beside: Sequence[Swap] = (),
    ) -> None:
        """``elsewhere``: what other modules' forwards see.

        ``stand_in``: called at first use with the index of a parameter and its view; what others see for
        ``Shown.GUARDS``. ``beside``: what else modules find in each state.
        """
        self.shown = Shown.ORIGINALS
        self.elsewhere = elsewhere
        self._stand_in = stand_in
        self._beside = beside
        self._lazy: list[LazyParameter] = []
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
                swap.of[Shown.ORIGINALS][attribute] = parameter.original
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

    def follow_requires_grad(self) -> None:
        for lazy in self._lazy:
            lazy.follow_requires_grad()

    def _prepare(self) -> None:
        # At first use, which is in the first forward: sharding a model is then as fast as it can be.
        if self._stand_in is not None:
            for index, parameter in enumerate(self._parameters):
                module, attribute = parameter.sites[0]
                stand_in = self._stand_in(index, self._swaps[module].of[Shown.VIEWS][attribute])
                if isinstance(stand_in, LazyParameter):
                    self._lazy.append(stand_in)
                for module, attribute in parameter.sites:
                    self._swaps[module].of[Shown.GUARDS][attribute] = stand_in
        swaps = [*self._swaps.values(), *self._beside]
        for module, swap in self._swaps.items():
            if isinstance(module, nn.RNNBase):
                weights = {shown: _torch_private.rnn_weights(module, values) for shown, values in swap.of.items()}
                swaps.append(Swap(module.__dict__, weights))
        self._updates = {
            shown: [(swap.target, name, value) for swap in swaps for name, value in swap.of[shown].items()]
            for shown in Shown
        }


class LazyParameter(torch.Tensor):
    """A parameter of a split module, outside of that module's forward.

    It has shape, strides, dtype and device of the whole parameter, and no memory. The first operation that needs values
    gathers the parameter and computes with it, which then replaces this one until the backward of that forward ends.

    Operations are caught below autograd, where those of C++ extensions and of autograd functions arrive as well. So
    autograd takes this tensor for the leaf, and a hook passes its gradient on to the true leaf.
    """

    _leaf: torch.Tensor
    _gather: Callable[[], torch.Tensor]
    _passes_on: bool

    @classmethod
    def of(cls, leaf: torch.Tensor, gather: Callable[[], torch.Tensor]) -> LazyParameter:
        """The stand-in of ``leaf``; ``gather`` fills ``leaf`` and returns it."""
        with torch.inference_mode(False):
            lazy = _torch_private.wrapper_of(cls, leaf)
        lazy._leaf, lazy._gather, lazy._passes_on = leaf, gather, False
        lazy.follow_requires_grad()
        return lazy

    def follow_requires_grad(self) -> None:
        self.requires_grad_(self._leaf.requires_grad)
        if self.requires_grad and not self._passes_on:
            self._passes_on = True
            self.register_post_accumulate_grad_hook(_pass_on)  # type: ignore[no-untyped-call]

    # Operations pass unseen above autograd.
    __torch_function__ = _torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = map_tensors(_whole_if_lazy, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def data_ptr(self) -> int:
        """Address of the parameter itself, for kernels that are launched from Python."""
        return _whole(self).data_ptr()


class LazyParameters(dict[str, Any]):
    """``_parameters`` of a module in a split module: reading an attribute gathers the parameter."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return _whole(value) if type(value) is LazyParameter else value


def _whole(lazy: LazyParameter) -> torch.Tensor:
    # The compiler may trace this call, or run it and compile its callees: it sees collectives in neither case.
    return _whole_uncompiled(lazy) if _torch_private.may_compile() else lazy._gather()


@_torch_private.hidden_from_compile
def _whole_uncompiled(lazy: LazyParameter) -> torch.Tensor:
    return lazy._gather()


def _whole_if_lazy(tensor: torch.Tensor) -> torch.Tensor:
    return _whole(tensor) if isinstance(tensor, LazyParameter) else tensor


def _pass_on(lazy: torch.Tensor) -> None:
    assert isinstance(lazy, LazyParameter)
    gradient, lazy.grad = lazy.grad, None
    leaf = lazy._leaf
    leaf.grad = gradient if leaf.grad is None or gradient is None else leaf.grad + gradient
