"""An optimizer that is no part of torch, whose state is not of its parameters' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

BLOCK = 4


class BlockwiseMomentum(torch.optim.Optimizer):
    """SGD whose momentum is kept with a scale for each block of four, as optimizers in eight bits do."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        # What a copy of parameter groups and state alone would lack.
        self.begun: dict[str, Any] = {"momentum": 0.9}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["scales"] = parameter.new_ones(-(-parameter.numel() // BLOCK) + 1)
                # As of what rounds at random.
                torch.rand(1)
                state["momentum"].mul_(self.begun["momentum"]).add_(parameter.grad)
                parameter.sub_(state["momentum"], alpha=group["lr"])
