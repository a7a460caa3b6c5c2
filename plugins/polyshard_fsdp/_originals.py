"""What modules and optimizers hold where one flat parameter stands for all (``use_orig_params=False``)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from polyshard.errors import ConfigError
from polyshard.planning.layout import FlatLayout
from polyshard.planning.plan import ManagedParameter
from polyshard.runtime.bindings import Bindings, ShardedParameter, Shown, Swap
from polyshard.runtime.parameters import GradientTarget, MasterViews
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ._flat_param import FlatParameter


class FlatOriginal(MasterViews):
    """One flat parameter over the whole master."""

    def __init__(self, flat_param: FlatParameter, layout: FlatLayout, master: torch.Tensor) -> None:
        self._flat_param = flat_param
        self._layout = layout
        self._master = master
        self.tensors = [flat_param]
        self._trained = flat_param.requires_grad
        self.expose()

    @property
    def gradient_targets(self) -> list[GradientTarget]:
        return [GradientTarget(self._flat_param, 0, tuple(self._master.shape), (1,))]

    @property
    def trained(self) -> list[bool]:
        return [self._flat_param.requires_grad] * len(self._layout.slots)

    def expose(self) -> None:
        self._flat_param.data = self._master

    def take_up_changes(self) -> bool:
        return self.retrained()

    def retrained(self) -> bool:
        before, self._trained = self._trained, self._flat_param.requires_grad
        return before != self._trained

    def refuse_changes(self, *, held: bool) -> None:
        """Nothing: no parameter is within the user's reach."""


class FlatBindings(Bindings):
    """Plain tensors under the parameters' names, in ``module.__dict__``.

    ``_parameters`` would make them the module's own again: in ``named_parameters``, in state dicts, in optimizers.
    """

    def __init__(
        self, parameters: Sequence[ManagedParameter], leaves: Sequence[torch.Tensor], *, guarded: bool
    ) -> None:
        super().__init__(parameters, leaves, guarded=guarded)
        # Whole views were left there when the parameters were flattened.
        self.shown = Shown.VIEWS
        self.show(Shown.ORIGINALS)

    def _collect(self, leaves: Sequence[torch.Tensor]) -> dict[nn.Module, Swap]:
        swaps: dict[nn.Module, Swap] = {}
        for parameter, leaf in zip(self._parameters, leaves, strict=True):
            guard = ShardedParameter.of(parameter)
            outside = guard if self._elsewhere is Shown.GUARDS else leaf.detach()
            for module, attribute in parameter.sites:
                swap = swaps.setdefault(module, Swap(module.__dict__, {shown: {} for shown in Shown}))
                swap.of[Shown.VIEWS][attribute] = leaf
                swap.of[Shown.ORIGINALS][attribute] = swap.of[Shown.GUARDS][attribute] = outside
        return swaps

    def _add_guards(self) -> None:
        """They are there already: outside of compute, too, nothing else stands under the names."""


class ReplacedParameters:
    """Parameters that a flat one took the place of. No module has them any more: their optimizer updates nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = False
        # What each was called, and on which rank.
        self._replaced: Any = WeakTensorKeyDictionary()
        # Optimizers that hold none of them, and how many parameter groups they had.
        self._passed: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    def add(self, parameters: Sequence[nn.Parameter], names: Sequence[str], rank: int) -> None:
        """Refuse optimizers of ``parameters``, which had ``names``, from now on."""
        with self._lock:
            for parameter, name in zip(parameters, names, strict=True):
                self._replaced[parameter] = name, rank
            self._passed.clear()
            if not self._watches:
                register_optimizer_step_pre_hook(self.before_step)
                self._watches = True

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """To be called before each step of each optimizer.

        Raises:
            ConfigError: it holds a trained parameter that was replaced.
        """
        if torch.compiler.is_compiling() or self._passed.get(optimizer) == len(optimizer.param_groups):
            return
        for parameter in (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad):
            found = self._replaced.get(parameter)
            if found is not None:
                name, rank = found
                raise ConfigError(
                    f"{type(optimizer).__name__} holds '{name}', which a flat parameter took the place of (rank "
                    f"{rank}, use_orig_params=False): it would never be updated. Make the optimizer from "
                    "model.parameters() behind the sharding, or pass use_orig_params=True."
                )
        self._passed[optimizer] = len(optimizer.param_groups)


#: Optimizers are one for the whole process, and know of no model.
replaced_parameters = ReplacedParameters()
