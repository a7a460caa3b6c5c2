"""Stand-ins for the parameters of a part, which bring the real ones where another module computes with them.

Nearly always that is where the other module reads them as an attribute, and then it gets the real ones at once. What is
left are the ways around attributes: ``head.parameters()``, a reference that was kept from an earlier forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _torch_private
from ..tensors import map_tensors

#: Gives the whole parameter, ordered so that the current stream may read it.
Lend = Callable[[], torch.Tensor]


class LentParameter(torch.Tensor):
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
    def of(cls, leaf: torch.Tensor, lend: Lend) -> LentParameter:
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


class LendingParameters(dict[str, Any]):
    """``_parameters`` of a module in a part: whoever reads an attribute gets a parameter to compute with."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return _whole(value) if type(value) is LentParameter else value


def _whole(lent: LentParameter) -> torch.Tensor:
    # The compiler may trace this call, or run it and compile what it calls: it sees collectives in neither case.
    return _whole_uncompiled(lent) if _torch_private.may_compile() else lent._lend()


@_torch_private.hidden_from_compile
def _whole_uncompiled(lent: LentParameter) -> torch.Tensor:
    return lent._lend()


def _pass_on(lent: torch.Tensor) -> None:
    assert isinstance(lent, LentParameter)
    gradient, lent.grad = lent.grad, None
    leaf = lent._leaf
    leaf.grad = gradient if leaf.grad is None or gradient is None else leaf.grad + gradient


def _lent(tensor: torch.Tensor) -> torch.Tensor:
    return _whole(tensor) if isinstance(tensor, LentParameter) else tensor
