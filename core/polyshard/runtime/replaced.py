"""Parameters in whose place sharding put others: their optimizers are refused, and modules that share them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigError


class ReplacedParameters:
    """Parameters that another one took the place of. No module has them any more: their optimizer updates nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = False
        # The name of each, and what to say of it.
        self._replaced: Any = WeakTensorKeyDictionary()
        # Optimizers that hold none of them, and how many parameter groups they had.
        self._passed: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    def add(self, parameters: Iterable[tuple[torch.Tensor, str]], by: str, where: str, instead: str = "") -> None:
        """Refuse optimizers of ``parameters``, each with its name, from now on.

        ``by``: what took their place, ``where``, with the rank; ``instead``: another way than a later optimizer.
        """
        with self._lock:
            for parameter, name in parameters:
                self._replaced[parameter] = name, by, where, instead
            self._passed.clear()
            if not self._watches:
                register_optimizer_step_pre_hook(self.before_step)
                self._watches = True

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name that ``parameter`` had in the model where another one took its place; None for no such one."""
        found = self._replaced.get(parameter)
        return None if found is None else found[0]

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called before each step of each optimizer.

        Raises ConfigError: it holds a trained parameter that was replaced.
        """
        if torch.compiler.is_compiling() or self._passed.get(optimizer) == len(optimizer.param_groups):
            return
        for parameter in (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad):
            found = self._replaced.get(parameter)
            if found is not None:
                name, by, where, instead = found
                raise ConfigError(
                    f"{type(optimizer).__name__} holds '{name}', which {by} took the place of ({where}): it would "
                    f"never be updated. Make the optimizer from model.parameters() behind the sharding{instead}."
                )
        self._passed[optimizer] = len(optimizer.param_groups)


#: Optimizers are one for the whole process, and know of no model.
replaced_parameters = ReplacedParameters()
