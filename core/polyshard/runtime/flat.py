"""One parameter over a unit's whole master, for optimizers that treat all elements alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import StateError
from .buffers import view_of
from .parameters import GradientTarget, MasterViews


class FlatParameter:
    """A ``DTensor`` of one dimension over the masters of all ranks, in the place of a unit's parameters.

    A step of the optimizer costs one tensor a unit. Padding stays zero, since its gradient is zero. The parameters'
    ``.grad`` are views of its gradient, made where somebody reads them.
    """

    def __init__(
        self,
        originals: MasterViews,
        master: torch.Tensor,
        spec: Any,
        placed: Callable[[int | None, torch.Tensor], torch.Tensor],
        name_of: Callable[[int | None], str],
    ) -> None:
        """Stand for ``originals``, over ``master``.

        Args:
            spec: How it lies, ``[shards * shard_numel]``.
            placed: What makes a part of a parameter, which it is told by index, the whole.
            name_of: In messages: the parameter at an index, the unit and the rank; of None the unit and the rank.

        Raises StateError: a parameter has a gradient already, or only some of them are trained.
        """
        self._originals, self.spec = originals, spec
        self._placed, self._name_of = placed, name_of
        if any(parameter.grad is not None for parameter in originals.tensors):
            raise StateError(
                f"A parameter of {name_of(None)} has a gradient already, which its flat parameter would not get. "
                "Call flat_parameters() before the first backward, or after zero_grad()."
            )
        with torch.inference_mode(False):
            #: This rank's elements, in the same memory.
            self.local = nn.Parameter(view_of(master, (master.numel(),), (1,), 0), requires_grad=False)
            own = _torch_private.over_own_storage(self.local.detach())
            self.parameter = _torch_private.dtensor_parameter(own, spec, requires_grad=False)
        self.follow_requires_grad()
        self.show_gradients()

    @property
    def gradient_target(self) -> GradientTarget:
        """The flat parameter, which receives all of this rank's gradient."""
        return GradientTarget(self.parameter, 0, (self.local.numel(),), (1,))

    def follow_requires_grad(self) -> None:
        """Train it where the parameters are trained.

        Raises StateError: only some of them are: weight decay and momentum would move the others.
        """
        trained = set(self._originals.trained)
        self._mixed = len(trained) > 1
        if self._mixed:
            raise StateError(
                f"Only some parameters of {self._name_of(None)} are trained, but its flat parameter is updated as one. "
                "Freeze all of them, freeze them before sharding, or give model.parameters() to the optimizer."
            )
        self.parameter.requires_grad_(trained == {True})
        self.local.requires_grad_(trained == {True})

    def adopt_changes(self) -> None:
        """Raise StateError as ``follow_requires_grad``, until the user changed that."""
        if self._mixed:
            self.follow_requires_grad()

    def show_gradients(self) -> None:
        """Let ``.grad`` of the parameters be views of the flat gradient."""
        kind = _viewing()
        for target in self._originals.gradient_targets:
            target.parameter.__class__ = kind
            target.parameter._polyshard_gradient = _Gradient(self, target)  # type: ignore[attr-defined]


class _Gradient:
    """The gradient of one parameter, in that of its unit's flat parameter."""

    __slots__ = ("_flat", "_target")

    def __init__(self, flat: FlatParameter, target: GradientTarget) -> None:
        self._flat, self._target = flat, target

    def read(self) -> torch.Tensor | None:
        whole = self._flat.parameter.grad
        if whole is None:
            return None
        local, target = _torch_private.local_tensor(whole), self._target
        part = local.as_strided(target.shape, target.stride, local.storage_offset() + target.offset)
        return self._flat._placed(target.index, part)

    def write(self, value: torch.Tensor | None) -> None:
        """Raises StateError: ``value`` is another gradient, and no change in place."""
        if value is None:
            # As ``zero_grad`` does, for all parameters.
            self._flat.parameter.grad = None
            return
        raise StateError(
            f".grad of {self._flat._name_of(self._target.index)} was set, which is a view of the gradient of its "
            "unit's flat parameter. Change it in place, or do without polyshard.flat_parameters."
        )

    # A parameter that is copied by itself takes no model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    @override
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    return None


@cache
def _viewing() -> type[nn.Parameter]:
    """The class of parameters whose gradients are views of flat ones. Nothing else tells that one is read."""
    from torch.distributed.tensor import DTensor

    class FlatDTensor(DTensor):
        _polyshard_gradient: _Gradient

        @property  # type: ignore[explicit-override]  # mypy sees no override of a property that has a setter
        def grad(self) -> torch.Tensor | None:
            return self._polyshard_gradient.read()

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            self._polyshard_gradient.write(value)

        @override
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            spec: Any = self._spec
            local = copy.deepcopy(_torch_private.local_tensor(self).detach(), memo)
            return _torch_private.dtensor_parameter(local, spec, requires_grad=self.requires_grad)

    return cast("type[nn.Parameter]", FlatDTensor)
