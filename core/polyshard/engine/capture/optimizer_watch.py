"""What a recorded step takes for granted about an optimizer: where its state lies, and its settings."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from .held_tensors import differ


def optimizer_obstacle(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    """Why steps of ``optimizer`` cannot be recorded, or None. To be asked once it has stepped."""
    kind = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable") is False:
            return f"{kind} was made with capturable=False (parameter group {index}). Make it with capturable=True."
    for values in optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                if value.device.type == device.type:
                    continue
            elif value is None or isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
                continue
            return (
                f"The state '{key}' of {kind} is kept on the host, where a replay does not change it. "
                "Use an optimizer whose state is on the device."
            )
    return None


class OptimizerWatch:
    """An optimizer as it was before a step was recorded.

    Keeps the state's tensors alive: a replay writes to them, whatever became of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._entries = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        self._holders = list(optimizer.state.values())
        self._values = list(self._entries.values())
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._settings = [
            {key: _frozen(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def replaced(self) -> str | None:
        """Whether recording made or replaced state, whose memory nothing has written yet; says what."""
        kind = type(self._optimizer).__name__
        for parameter, values in self._optimizer.state.items():
            before = self._entries.get(parameter)
            if before is None:
                return (
                    f"{kind} made state for a parameter that had no gradient in the warm-up. Let every parameter take "
                    "part in the warm-up, or raise warmup."
                )
            for key, value in values.items():
                if value is not before.get(key):
                    return f"{kind} replaces its state '{key}' in each step. Use an optimizer that updates it in place."
        return None

    def restore(self) -> None:
        """Undo what recording did to the state."""
        state = self._optimizer.state
        for parameter in list(state):
            if parameter not in self._entries:
                del state[parameter]
            else:
                state[parameter].clear()
                state[parameter].update(self._entries[parameter])

    def changed(self) -> str | None:
        """What no longer is as it was recorded, and what to do; None where all is."""
        optimizer = self._optimizer
        kind = type(optimizer).__name__
        if self._state_replaced():
            return f"The state of {kind} was replaced since the step was captured. Call reset() to capture again."
        groups = optimizer.param_groups
        if differ([group["params"] for group in groups], self._members):
            return f"The parameters of {kind} changed since the step was captured. Call reset() to capture again."
        for index, (group, settings) in enumerate(zip(groups, self._settings, strict=True)):
            for key, recorded in settings.items():
                value = group.get(key)
                if not _same(value, recorded):
                    return _setting_changed(f"'{key}' of {kind}, parameter group {index},", value, recorded)
        return None

    def _state_replaced(self) -> bool:
        state = self._optimizer.state
        return (
            state is not self._state
            or len(state) != len(self._holders)
            or not all(map(is_, state.values(), self._holders))
            or differ(self._holders, self._values)
        )


def _frozen(value: Any) -> Any:
    # A tensor on the host is read when the step is recorded, as a number is.
    return value.clone() if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value


def _same(value: Any, recorded: Any) -> bool:
    if value is recorded:
        return True
    if isinstance(value, torch.Tensor) or isinstance(recorded, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(recorded, torch.Tensor)
            and value.device.type == recorded.device.type == "cpu"
            and torch.equal(value, recorded)
        )
    return bool(value == recorded)


def _setting_changed(what: str, value: Any, recorded: Any) -> str:
    if isinstance(recorded, torch.Tensor) and recorded.device.type != "cpu":
        return f"{what} was replaced since the step was captured. Write into the tensor: fill_() or copy_()."
    return (
        f"{what} is {_number(value)} and was {_number(recorded)} when the step was captured, which made it a constant. "
        "Make it a tensor on the model's device and write into that, or call reset() to capture again."
    )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
