"""What an optimizer's step takes: states, moments' memory, and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ..config import did_you_mean
from ..errors import ConfigError
from .memory import Kind, Ledger
from .recording import Recorder, Unit

#: Parameters that one launch of a fused or foreach kernel takes, about: torch cuts by blocks and by arguments.
_TOGETHER = 32


class OptimizerModel(Protocol):
    """An optimizer of the parameters' pieces."""

    def standing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of its state that no tensor on the meta device stands for."""
        ...

    def step(self, parameters: Sequence[nn.Parameter], recorder: Recorder, ledger: Ledger) -> None:
        """Note one step with the gradients that are there."""
        ...


@dataclass(frozen=True, slots=True)
class FusedAdamW:
    """``torch.optim.AdamW(fused=True)``: two states a parameter, everything read once and written once.

    Its kernel does not run on the meta device, so it is counted: 16 bytes a parameter for fp32 master, gradient and
    states (ZeRO, table 1, without the half-precision copies that polyshard does not keep).
    """

    states: int = 2

    def standing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return self.states * sum(parameter.nbytes for parameter in parameters)

    def step(self, parameters: Sequence[nn.Parameter], recorder: Recorder, ledger: Ledger) -> None:
        given = [parameter for parameter in parameters if parameter.grad is not None]
        # Master and states are read and written, gradients read.
        nbytes = sum(parameter.nbytes * (2 + 2 * self.states) + _gradient_nbytes(parameter) for parameter in given)
        launches = -(-len(given) // _TOGETHER)
        for _ in range(launches):
            recorder.kernel("fused_adamw", Unit.NONE, 0, nbytes // launches, 4)


@dataclass(frozen=True, slots=True)
class NoOptimizer:
    """Parameters are not updated."""

    def standing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return 0

    def step(self, parameters: Sequence[nn.Parameter], recorder: Recorder, ledger: Ledger) -> None:
        return None


class RunOptimizer:
    """Any optimizer, made by ``factory`` of the pieces and run on the meta device: what it allocates is seen."""

    def __init__(self, factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer], label: str) -> None:
        self._factory = factory
        self._label = label
        self._optimizer: torch.optim.Optimizer | None = None

    def standing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return 0

    def step(self, parameters: Sequence[nn.Parameter], recorder: Recorder, ledger: Ledger) -> None:
        try:
            if self._optimizer is None:
                self._optimizer = self._factory([each for each in parameters if each.numel()])
            self._optimizer.step()
        except Exception as error:
            raise ConfigError(
                f"the optimizer {self._label!r} raised {type(error).__name__}: {error}. It is made of a list of "
                "parameters and steps on the meta device, where tensors have no values: leave out fused=True, which "
                "'adamw' stands for."
            ) from error
        states = self._optimizer.state.values()
        ledger.see([value for state in states for value in state.values() if _is_tensor(value)], Kind.OPTIMIZER)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _gradient_nbytes(parameter: nn.Parameter) -> int:
    return 0 if parameter.grad is None else parameter.grad.nbytes


def _foreach_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=True)


_NAMED: dict[str, Callable[[], OptimizerModel]] = {
    "adamw": FusedAdamW,
    "adamw-foreach": lambda: RunOptimizer(_foreach_adamw, "adamw-foreach"),
    "sgd": lambda: RunOptimizer(_sgd, "sgd"),
    "none": NoOptimizer,
}

OPTIMIZERS = tuple(_NAMED)


def find_optimizer(name: str) -> OptimizerModel:
    """The one called ``name``, made anew.

    Raises:
        ConfigError: none is.
    """
    if name not in _NAMED:
        raise ConfigError(
            f"No optimizer is called {name!r}.{did_you_mean(name, list(_NAMED))} Named ones: {', '.join(_NAMED)}; or "
            "package.module:factory, which takes a list of parameters."
        )
    return _NAMED[name]()
