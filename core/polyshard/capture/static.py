"""Inputs and optimizers of a recorded step: tensors filled before each replay, state and settings that must stay."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from ..errors import CaptureError
from ..nested import differ, fields_of, map_tensors

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
#: Types of constants in a recording: compared by value, and immutable.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
)


class StaticInputs:
    """Static tensors in the places of the tensors of one call's arguments.

    Args:
        args, kwargs: tensors, containers of tensors (tuples, lists, dicts, dataclasses) and constants.
        device: where the static tensors live.

    Raises:
        CaptureError: naming an argument that cannot be static: a tensor that wants a gradient or is not strided, or an
            object whose changes cannot be noticed.
    """

    def __init__(self, args: Args, kwargs: Kwargs, device: torch.device) -> None:
        kwargs = dict(sorted(kwargs.items()))
        for path, value in _leaves(args, kwargs):
            _refuse(path, value)
        self._device = device
        with torch.inference_mode(False), torch.no_grad():
            self.args: Args
            self.kwargs: dict[str, Any]
            self.args, self.kwargs = map_tensors(self._static, (args, kwargs))
        self._leaves = list(_leaves(self.args, self.kwargs))

    def _static(self, tensor: torch.Tensor) -> torch.Tensor:
        # Never the caller's own memory, which the caller may free or write.
        return torch.empty_like(tensor, device=self._device, requires_grad=False).copy_(tensor)

    def mismatch(self, args: Args, kwargs: Kwargs) -> str | None:
        """In what these arguments differ from the recorded ones, or None where they can be replayed."""
        leaves = list(_leaves(args, dict(sorted(kwargs.items()))))
        # One tensor at several places has one static tensor, which could hold the values of one of them only.
        first: dict[int, tuple[str, object]] = {}
        for (path, value), (recorded_path, recorded) in zip(leaves, self._leaves, strict=False):
            if path != recorded_path:
                return f"{recorded_path} was given in the captured call, {path} in its place now"
            difference = self._difference(value, recorded)
            if difference is not None:
                return f"{path} {difference}"
            if isinstance(recorded, torch.Tensor):
                first_path, first_value = first.setdefault(id(recorded), (path, value))
                if first_value is not value:
                    return f"{path} was the same tensor as {first_path} in the captured call, and is not now"
        if len(leaves) > len(self._leaves):
            return f"{leaves[len(self._leaves)][0]} was not given in the captured call"
        if len(leaves) < len(self._leaves):
            return f"{self._leaves[len(leaves)][0]} was given in the captured call, and is not now"
        return None

    def load(self, args: Args, kwargs: Kwargs) -> None:
        """Copy the tensors into the static ones, on the current stream. Nothing may be mismatched."""
        with torch.no_grad():
            given = _leaves(args, dict(sorted(kwargs.items())))
            for (_, static), (_, tensor) in zip(self._leaves, given, strict=True):
                if isinstance(static, torch.Tensor) and isinstance(tensor, torch.Tensor):
                    static.copy_(tensor, non_blocking=True)

    def _difference(self, value: object, recorded: object) -> str | None:
        if not isinstance(value, torch.Tensor) or not isinstance(recorded, torch.Tensor):
            if value is recorded or (type(value) is type(recorded) and value == recorded):
                return None
            return f"is {_shortened(value)}, and was {_shortened(recorded)} in the captured call"
        if value.shape != recorded.shape:
            return f"has shape {tuple(value.shape)}, and had {tuple(recorded.shape)} in the captured call"
        if value.dtype != recorded.dtype:
            return f"is {value.dtype}, and was {recorded.dtype} in the captured call"
        if value.requires_grad:
            return "wants a gradient, which would arrive in another tensor"
        if value.device != self._device and value.device.type != "cpu":
            return f"is on {value.device}; give it on the CPU or on {self._device}"
        return None


def to_device(args: Args, kwargs: Kwargs, device: torch.device) -> tuple[Args, dict[str, Any]]:
    """The arguments with every tensor on ``device``; the copy of a pinned tensor does not hold up the host."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, dict(kwargs)))


def _leaves(args: Args, kwargs: Kwargs) -> Iterator[tuple[str, object]]:
    for index, value in enumerate(args):
        yield from _walk(f"argument {index}", value)
    for key, value in kwargs.items():
        yield from _walk(f"argument '{key}'", value)


def _walk(path: str, value: Any) -> Iterator[tuple[str, object]]:
    # The containers of nested.iter_tensors.
    items: list[tuple[str, Any]]
    if isinstance(value, (torch.Tensor, PackedSequence, *_CONSTANTS)):
        yield path, value
        return
    if isinstance(value, (tuple, list)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f"{path}.{name}", item) for name, item in fields_of(value).items()]
    else:
        yield path, value
        return
    yield path, _Container(type(value), tuple(value) if isinstance(value, dict) else (len(items),))
    for inner, item in items:
        yield from _walk(inner, item)


class _Container(NamedTuple):
    """Stands for a container in a list of leaves: two of them are alike if type and keys are."""

    kind: type
    keys: tuple[object, ...]

    @override
    def __str__(self) -> str:
        keys = self.keys
        size = f"{keys[0]} items" if len(keys) == 1 and isinstance(keys[0], int) else f"keys {list(keys)}"
        return f"a {self.kind.__name__} of {size}"


def _refuse(path: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            raise CaptureError(f"{path} wants a gradient, which would arrive in a static copy of it. Detach it.")
        if value.layout is not torch.strided:
            raise CaptureError(f"{path} has layout {value.layout}. Give strided tensors.")
    elif not isinstance(value, (_Container, *_CONSTANTS)) or isinstance(value, PackedSequence):
        raise CaptureError(
            f"{path} is a {type(value).__name__}, of which it cannot be told what changes from call to call. Give "
            "tensors, numbers, strings, or tuples, lists, dicts and dataclasses of them."
        )


def _shortened(value: object) -> str:
    if isinstance(value, _Container):
        return str(value)
    if not isinstance(value, _CONSTANTS):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let an optimizer of PyTorch count its steps on ``device``: its option ``capturable``, which is off by default.

    Before each step in front of a recording: a loaded state dict brings the option of the run that saved it.
    """
    if "capturable" in optimizer.defaults:
        optimizer.defaults["capturable"] = True
    for group in optimizer.param_groups:
        if group.get("capturable") is not False:
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type == "cpu":
                    state[key] = value.to(device)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """The learning rate of each parameter group; None of one without, or where it is a tensor."""
    rates = (group.get("lr") for group in optimizer.param_groups)
    return [rate if isinstance(rate, (int, float)) else None for rate in rates]


class _WatchedGroup(dict[str, Any]):
    """Stands for a parameter group while a step runs, and notes whether that writes the learning rate.

    A scheduler writes it in each step, and nearly always the rate that was there.
    """

    written = False

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        self.written |= key == "lr"
        super().__setitem__(key, value)


class RateWatch:
    """Whether a step that runs inside of it sets learning rates of ``optimizer``, or steps a scheduler that does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.written = False

    def __enter__(self) -> RateWatch:
        self._groups = [(group, _WatchedGroup(group), _version_of(group)) for group in self._optimizer.param_groups]
        self._optimizer.param_groups[:] = [watched for _, watched, _ in self._groups]
        return self

    def __exit__(self, *_: object) -> None:
        present = self._optimizer.param_groups
        for group, watched, version in self._groups:
            # A program may hold the group itself, and write there: what it wrote stays.
            self.written |= watched.written or group.get("lr") is not watched.get("lr") or _version_of(group) != version
            if not watched.written:
                watched.pop("lr", None)
            group.update(watched)
            for index, each in enumerate(present):
                if each is watched:
                    present[index] = group


def _version_of(group: Mapping[str, Any]) -> int | None:
    rate = group.get("lr")
    return rate._version if isinstance(rate, torch.Tensor) else None


def optimizer_obstacle(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    """Why steps of ``optimizer`` cannot be recorded, or None. To be asked once it has stepped."""
    kind = type(optimizer).__name__
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

    Keeps the state's tensors alive: a replay writes to them, even after the optimizer is gone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, *, varies: bool) -> None:
        """``varies``: the recorded step reads learning rates from tensors, which ``load`` fills with groups' numbers.

        They are of 32 bits, as torch's kernels want. As constants they equal those of eager steps to the last bit.
        """
        self._optimizer = optimizer
        # Of each group, the number that was loaded last and its tensor; None where the rate is a constant.
        self._rates = [
            # Others than these kernels read it on the host, to scale by a number.
            (rate, torch.tensor(rate, dtype=torch.float32, device=device))
            if varies and rate is not None and (group.get("capturable") or group.get("fused"))
            else None
            for group, rate in zip(optimizer.param_groups, rates_of(optimizer), strict=True)
        ]
        self._state = optimizer.state
        self._entries = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        self._holders = list(optimizer.state.values())
        self._values = list(self._entries.values())
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._settings = [
            {key: _frozen(value) for key, value in group.items() if key != "params" and not (key == "lr" and rate)}
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True)
        ]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, a step reads the rates that vary from their tensors."""
        groups = [(group, *rate) for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True) if rate]
        try:
            for group, _, tensor in groups:
                group["lr"] = tensor
            yield
        finally:
            for group, number, _ in groups:
                group["lr"] = number

    def load(self) -> None:
        """Give the next replay the learning rates that the groups have now, on the current stream."""
        for index, rate in enumerate(self._rates):
            if rate is None:
                continue
            number = self._optimizer.param_groups[index]["lr"]
            if number != rate[0]:
                rate[1].fill_(number)
                self._rates[index] = number, rate[1]

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
            if self._rates[index] is not None and not isinstance(group["lr"], (int, float)):
                return f"'lr' of {kind}, parameter group {index}, is no number any more. Call reset() to capture again."
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
