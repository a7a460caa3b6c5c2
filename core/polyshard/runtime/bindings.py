"""Which tensor stands under a parameter's name: the original, the view that computes, or a guard."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..errors import UnshardedUseError
from ..nested import map_tensors
from ..planning.plan import ManagedParameter

#: What may be asked of a parameter whose values are not there.
_HARMLESS = frozenset(
    {
        "__format__",
        "__hash__",
        "__len__",
        "__repr__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "ndimension",
        "nelement",
        "numel",
        "size",
        "stride",
    }
)
#: Attributes that lead to values.
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class Shown(enum.Enum):
    """What modules see under their parameters' names."""

    ORIGINALS = "originals"
    """The user's own parameters: shards, outside of compute."""
    VIEWS = "views"
    """Whole parameters in compute dtype, during the unit's own compute."""
    GUARDS = "guards"
    """While another unit's forward runs: stand-ins that refuse to compute or, of a part, bring the parameter."""


class ShardedParameter(torch.Tensor):
    """A sharded parameter seen from inside somebody else's forward: looking at it is fine, computing with it raises.

    The parameter itself is a 1-D piece there. A tied head that computes with it would fail on its shape or, worse,
    would not.
    """

    _parameter: ManagedParameter

    @classmethod
    def of(cls, parameter: ManagedParameter) -> ShardedParameter:
        """The stand-in of ``parameter``."""
        original = parameter.original
        with _torch_private.without_torch_function():
            guard = original.detach().as_subclass(cls)
            guard.requires_grad_(original.requires_grad)
        guard._parameter = parameter
        return guard

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape, dtype and the like; refuse anything that reads values."""
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
        if is_attribute or name in _HARMLESS:
            with _torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        used = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)), None)
        which = f"'{used._parameter.names[0]}'" if used is not None else "of a unit"
        raise UnshardedUseError(
            f"The parameter {which} was used by {name or func} while it is sharded. Compute with it inside its own "
            "module's forward, name the method that does with polyshard.register_forward_method, or let both users "
            "share one unit."
        )


@dataclass(frozen=True, slots=True)
class Swap:
    """What one module's names stand for, in the dict where it looks them up."""

    target: dict[str, Any]
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
        guarded: bool,
        lends: Sequence[Lend] | None = None,
    ) -> None:
        """``guarded``: views have no memory outside of the unit's compute. ``lends``: of a part, one a parameter."""
        self.shown = Shown.ORIGINALS
        # Where nothing is ever released, whoever computes gets the leaf whose gradient is reduced.
        self._elsewhere = Shown.GUARDS if guarded else Shown.VIEWS
        self._lends = lends
        self._lent: list[LazyParameter] = []
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

    def hide(self, computing: bool) -> None:
        """Let modules see the originals, or, while a forward is ``computing``, what it may see of other units."""
        self.show(self._elsewhere if computing else Shown.ORIGINALS)

    def show(self, shown: Shown) -> None:
        """Let modules see ``shown``. Views must be attached by then."""
        if self.shown is not shown:
            if not self._updates:
                self._prepare()
            for target, name, tensor in self._updates[shown]:
                target[name] = tensor
            self.shown = shown

    def follow_requires_grad(self) -> None:
        """Take up a ``requires_grad`` that changed on a view."""
        for lent in self._lent:
            lent.follow_requires_grad()

    def _add_guards(self) -> None:
        if self._elsewhere is Shown.GUARDS:
            for index, parameter in enumerate(self._parameters):
                guard = self._guard(index, parameter)
                for module, attribute in parameter.sites:
                    self._swaps[module].of[Shown.GUARDS][attribute] = guard

    def _guard(self, index: int, parameter: ManagedParameter) -> torch.Tensor:
        if self._lends is None:
            return ShardedParameter.of(parameter)
        module, attribute = parameter.sites[0]
        lent = LazyParameter.of(self._swaps[module].of[Shown.VIEWS][attribute], self._lends[index])
        self._lent.append(lent)
        return lent

    def _prepare(self) -> None:
        # At first use, which is in the first forward: sharding a model is then as fast as it can be.
        self._add_guards()
        swaps = list(self._swaps.values())
        swaps += [_flat_weights(module, swap) for module, swap in self._swaps.items() if isinstance(module, nn.RNNBase)]
        self._updates = {
            shown: [(swap.target, name, value) for swap in swaps for name, value in swap.of[shown].items()]
            for shown in Shown
        }


def _flat_weights(module: nn.RNNBase, swap: Swap) -> Swap:
    lists = {shown: _torch_private.rnn_weights(module, values) for shown, values in swap.of.items()}
    return Swap(module.__dict__, lists)


# Stand-ins for the parameters of a part, which bring the real ones where another module computes with them.
#
# Nearly always that is where the other module reads them as an attribute, and then it gets the real ones at once. What is
# left are the ways around attributes: ``head.parameters()``, a reference that was kept from an earlier forward.


#: Gives the whole parameter, ordered so that the current stream may read it.
Lend = Callable[[], torch.Tensor]


class LazyParameter(torch.Tensor):
    """A parameter of a part, seen from outside of the part's forward.

    Shape, strides, dtype and device are the whole parameter's, and there is no memory behind them. The first operation
    that needs values computes with the parameter itself, and goes on in the place of this one until the backward of
    that forward has ended.

    Operations are caught below autograd, where those of C++ extensions and of autograd functions arrive as well. So
    autograd takes this tensor for the leaf, and its gradient is passed on to the leaf that it stands for.
    """

    _leaf: torch.Tensor
    _lend: Lend
    _passes_on: bool

    @classmethod
    def of(cls, leaf: torch.Tensor, lend: Lend) -> LazyParameter:
        """The stand-in of ``leaf``; ``lend`` fills and returns that."""
        with torch.inference_mode(False):
            lent = _torch_private.wrapper_of(cls, leaf)
        lent._leaf, lent._lend, lent._passes_on = leaf, lend, False
        lent.follow_requires_grad()
        return lent

    def follow_requires_grad(self) -> None:
        """Take up a ``requires_grad`` that changed on the leaf."""
        self.requires_grad_(self._leaf.requires_grad)
        if self.requires_grad and not self._passes_on:
            self._passes_on = True
            self.register_post_accumulate_grad_hook(_pass_on)  # type: ignore[no-untyped-call]

    # Operations on this class are not looked at above autograd.
    __torch_function__ = _torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with the parameters themselves."""
        args, kwargs = map_tensors(_lent, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def data_ptr(self) -> int:
        """Address of the parameter itself, for kernels that are launched from Python."""
        return _whole(self).data_ptr()


class LazyParameters(dict[str, Any]):
    """``_parameters`` of a module in a part: whoever reads an attribute gets a parameter to compute with."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return _whole(value) if type(value) is LazyParameter else value


def _whole(lent: LazyParameter) -> torch.Tensor:
    # The compiler may trace this call, or run it and compile what it calls: it sees collectives in neither case.
    return _whole_uncompiled(lent) if _torch_private.may_compile() else lent._lend()


@_torch_private.hidden_from_compile
def _whole_uncompiled(lent: LazyParameter) -> torch.Tensor:
    return lent._lend()


def _pass_on(lent: torch.Tensor) -> None:
    assert isinstance(lent, LazyParameter)
    gradient, lent.grad = lent.grad, None
    leaf = lent._leaf
    leaf.grad = gradient if leaf.grad is None or gradient is None else leaf.grad + gradient


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    return _whole(tensor) if isinstance(tensor, LazyParameter) else tensor
