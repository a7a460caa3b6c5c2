"""Muon over sharded parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ConfigTypeError
from ..functions.lookup import placement_of
from .momentum import go_along, mix
from .newton_schulz import COEFFICIENTS, newton_schulz, newton_schulz_flops
from .whole_tensors import Parameters, WholeTensorOptimizer

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(WholeTensorOptimizer):
    """Muon (Jordan et al. 2024), exact for every layout and strategy: what ``torch.optim.Muon`` does on whole matrices.

    The momentum of each matrix is brought to one rank, orthogonalised there once, and what that gives goes back. Ranks
    share the work of all matrices, those of hybrid replicas included. The momentum itself stays sharded.

    Args:
        params: matrices; what else the model has goes to another optimizer (``for_matrices``).
        lr: learning rate; a number, or a 0-dim tensor.
        weight_decay: decoupled.
        momentum: of the running mean of gradients.
        nesterov: whether the gradient is mixed with the mean before it is orthogonalised.
        ns_coefficients: of the Newton-Schulz iteration.
        eps: smallest norm that a matrix is divided by.
        ns_steps: Newton-Schulz iterations.
        adjust_lr_fn: how the learning rate follows from the shape: ``"original"`` (None) multiplies it by
            ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` by ``0.2 sqrt(max(rows, columns))``.
        dtype: in which momentum travels and is orthogonalised; torch.optim.Muon orthogonalises in bf16.

    Raises:
        ConfigError: a parameter that is no matrix, or a setting that is none.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ConfigTypeError(f"dtype of Muon must be a floating-point torch.dtype, not {dtype!r}.")
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As for every optimizer of torch.

        Raises:
            ConfigError: a parameter that is no matrix, or a setting that is none.
        """
        super().add_param_group(param_group)
        try:
            _refuse_bad_settings(self.param_groups[-1])
            _refuse_no_matrices(self.param_groups[-1]["params"])
        except ConfigError:
            self.param_groups.pop()
            raise

    def contribute(
        self,
        group: Mapping[str, Any],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
    ) -> None:
        """The momentum, mixed with the gradient where that is asked for."""
        means = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
            means.append(state["momentum_buffer"])
        mix(means, gradients, places, group["momentum"], group["nesterov"])

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """Their orthogonal factors."""
        return newton_schulz(wholes, group["ns_steps"], group["ns_coefficients"], group["eps"])

    def update(
        self,
        group: Mapping[str, Any],
        shape: tuple[int, ...],
        parameters: Sequence[nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Decay, and go along them."""
        ratio = _ratio(group["adjust_lr_fn"], shape)
        go_along(parameters, results, group["lr"], ratio, group["weight_decay"])

    def work(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> float:
        """Floating-point operations of its orthogonalisation."""
        rows, columns = shape
        return newton_schulz_flops(rows, columns, group["ns_steps"])


def _ratio(adjustment: str | None, shape: tuple[int, ...]) -> float:
    """What the learning rate of a matrix is multiplied by, as torch.optim.Muon documents it."""
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _refuse_bad_settings(group: Mapping[str, Any]) -> None:
    lr, steps, coefficients = group["lr"], group["ns_steps"], group["ns_coefficients"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ConfigError(f"Tensor lr must be 1-element, but has shape {tuple(lr.shape)}. Give a 0-dim tensor.")
    for name in ("lr", "momentum", "weight_decay"):
        # A tensor on a device is not waited for.
        if isinstance(group[name], torch.Tensor):
            continue
        if not isinstance(group[name], int | float) or not group[name] >= 0.0:
            raise ConfigError(f"{name} of Muon should be a number >= 0 but is {group[name]!r}.")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ConfigError(
            f"Adjust learning rate function {group['adjust_lr_fn']!r} is not supported. There are: "
            f"{', '.join(map(repr, _ADJUSTMENTS))}."
        )
    if not isinstance(steps, int) or not 0 <= steps < 100 or len(coefficients) != 3:
        raise ConfigError(
            f"Muon takes fewer than 100 ns_steps and three ns_coefficients, not {steps!r} and {coefficients!r}."
        )


def _refuse_no_matrices(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        shape = placement_of(parameter).shape
        if len(shape) != 2 or parameter.is_complex():
            raise ConfigError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {shape} of "
                f"{parameter.dtype}. Give it matrices alone (polyshard.optim.for_matrices), and the rest to another "
                "optimizer."
            )
