"""One optimizer or several, whose states a checkpoint holds as one's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigTypeError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class Joint:
    """Optimizers as one: their parameter groups one after the other, each parameter's state with its own optimizer."""

    def __init__(self, given: Optimizers) -> None:
        """``given``: in the same order at each save and load.

        Raises:
            ConfigTypeError: there is something else among them, or nothing.
        """
        self.members = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
        other = next((each for each in self.members if not isinstance(each, torch.optim.Optimizer)), None)
        if other is not None or not self.members:
            raise ConfigTypeError(
                f"A checkpoint got {type(other).__name__ if self.members else 'an empty sequence'} for an optimizer. "
                "Give an optimizer of PyTorch, a sequence of them, or None."
            )
        self.groups: list[dict[str, Any]] = [group for each in self.members for group in each.param_groups]
        self._optimizer_of = {
            parameter: each for each in self.members for group in each.param_groups for parameter in group["params"]
        }

    def parts(self) -> Iterator[tuple[torch.optim.Optimizer, slice]]:
        """Each optimizer, and which of ``groups`` are its own."""
        start = 0
        for each in self.members:
            yield each, slice(start, start + len(each.param_groups))
            start += len(each.param_groups)

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """What its optimizer has for ``parameter``."""
        found: Mapping[str, Any] = self._optimizer_of[parameter].state.get(parameter, {})
        return found

    def replace_state(self, parameter: nn.Parameter, state: dict[str, Any] | None) -> None:
        """Let its optimizer have ``state`` for ``parameter``; None or nothing in it for none."""
        own = self._optimizer_of[parameter].state
        own.pop(parameter, None)
        if state:
            own[parameter] = state
