"""A sharded model under CUDA graphs: whether a step can be recorded, and whether the model is still as it was then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from .. import _torch_private
from ..interfaces import Collectives
from ..planning.parts import is_dtensor
from .root import Root
from .streams import streams_for
from .unit import Unit

_address_of = torch.Tensor.data_ptr
_is_trained = attrgetter("requires_grad")
_state_of = attrgetter("gathered.state")
_master_of = attrgetter("master")
_waits = attrgetter("gradients.unreduced")


def groups_of(root: Root) -> Iterable[Collectives]:
    """All groups of ranks that the model communicates over, each once."""
    groups = {id(root.collectives): root.collectives}
    for unit in root.units:
        for group in (unit.ranks.owner, unit.ranks.gather, unit.ranks.replicate):
            if group is not None:
                groups[id(group)] = group
    return groups.values()


def capture_obstacle(root: Root) -> str | None:
    """The reason why no step of this model can be recorded, alike on all ranks, or None."""
    for group in groups_of(root):
        if not group.capabilities.capturable:
            return f"{type(group).__name__} cannot be recorded in a graph. Choose collectives that can, such as 'nccl'."
    for unit in root.units:
        if unit.extended:
            return (
                f"'{unit.parameters[0].names[0]}' gathers itself, and its class is asked on the host in each gather. "
                "Train without capture."
            )
        if unit.offloaded:
            return (
                f"{type(unit.offload).__name__} keeps the parameters of '{unit.name}' away from the device, and the "
                "host waits for them in each step. Shard with offload='none'."
            )
        if unit.precision.capabilities.encodes:
            return (
                f"{type(unit.precision).__name__} encodes what travels, and prepares that on the host before each "
                "forward. Choose a precision that casts only."
            )
    if root.events.steps or any(unit.observers for unit in root.units):
        return "The model has listeners that hear of steps, which a replay would not call. Shard it without these."
    return None


def step_obstacle(root: Root) -> str | None:
    """The reason why the next step cannot be recorded or replayed in the engine's present state, or None."""
    if not root.synchronises:
        return (
            "It was called under no_sync(). Enter no_sync() inside train_step, around the backwards that do not reduce."
        )
    if not root.last_backward or not all(
        each.synchronises and each.all_reduces and each.releases_after_backward is each.releases_by_default
        for each in root.module_states
    ):
        return (
            "A module was set to accumulate gradients, or to keep parameters after backward. Set everything back: a "
            "recorded step does the same each time."
        )
    if root.uses:
        return (
            "Ranks agreed on the use of modules, which differs from step to step. Agree on none to record: "
            "agree_on_use(model, {})."
        )
    if any(map(_waits, root.units)):
        return (
            "Gradients of earlier backwards under no_sync() wait to be reduced. Let train_step reduce what it computed."
        )
    return None


def prepare_recording(root: Root) -> None:
    """Do everything that a forward does before its first operation, and release all buffers.

    Raises ParameterChangedError: a parameter was removed, or replaced by one of another shape, dtype or device.
    """
    root.adopt_changes()
    release_buffers(root)


def release_buffers(root: Root) -> None:
    """Release all gather buffers, and order the current stream after everything that was issued."""
    for unit in root.units:
        unit.gathered.reshard()
    root.streams.drain()


def recover_from_recording(root: Root) -> None:
    """Restore the state between steps after a recording that failed."""
    # The old streams' events belong to a recording that is gone: waiting for one would fail.
    root.use_streams(streams_for(root.collectives))
    root.abandon()


class RecordedState:
    """The model as it was when a step was recorded, its buffers released.

    Changes are found by lists that are made and compared at C speed: a launch-bound step waits for the answer.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._module = root.module_states[0].module
        self._training = self._module.training
        self._units = list(root.units)
        self._masters = _addresses(self._units)
        self._states = list(map(_state_of, self._units))
        self._tensors = HeldTensors(self._module, [(unit.name, unit.held.receivers) for unit in self._units])

    @property
    def released(self) -> bool:
        """Whether no buffer was attached since."""
        return list(map(_state_of, self._units)) == self._states

    def obstacle(self) -> tuple[str, bool] | None:
        """Why the recording cannot be replayed, and whether that lasts until it is recorded anew; None where it can."""
        reason = step_obstacle(self._root)
        if reason is not None:
            return reason, False
        if self._module.training is not self._training:
            mode = "train" if self._training else "eval"
            return f"The model was in {mode} mode when the step was captured. Call {mode}() before the step.", False
        if _addresses(self._units) != self._masters:
            return "Parameters moved since the step was captured. Call reset() to capture again.", True
        changed = self._tensors.changed()
        if changed is not None:
            return f"{changed} since the step was captured. Call reset() to capture again.", True
        return None


def _addresses(units: list[Unit]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, map(_master_of, units)))


class HeldTensors:
    """Notices a tensor or a module that was replaced or added, and a tensor that was moved, frozen or unfrozen.

    Each replay checks every one, by lists made and compared at C speed. What modules hold takes 20 ns an entry,
    addresses and ``requires_grad`` 85 ns a parameter together: 0.1 ms a replay for a thousand parameters.
    """

    def __init__(self, module: nn.Module, others: Iterable[tuple[str, Sequence[torch.Tensor]]]) -> None:
        """``others``: named tensors beside those that ``module`` and the modules inside it hold."""
        named = list(module.named_modules())
        self._holders: list[dict[str, Any]] = [
            holder for _, inner in named for holder in (inner._parameters, inner._buffers, inner._modules)
        ]
        self._held = self._found
        prefixes = [f"{prefix}." if prefix else "" for prefix, _ in named for _ in range(3)]
        #: The name of each of ``_held``.
        self._names = [prefix + key for prefix, held in zip(prefixes, self._holders, strict=True) for key in held]
        tensors = {
            each: name for name, each in zip(self._names, self._held, strict=True) if isinstance(each, torch.Tensor)
        }
        for name, several in others:
            for tensor in several:
                tensors.setdefault(tensor, f"flat parameter of {name}")
        self._addressed = [tensor for tensor in tensors if _has_address(tensor)]
        self._placed = [tensor for tensor in tensors if is_dtensor(tensor)]
        self._addresses = self._found_at
        self._parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))
        self._named = tensors

    def changed(self) -> str | None:
        """The first change, as the begin of a sentence; None for no change."""
        found = self._found
        if (
            len(found) != len(self._held)
            or not all(map(is_, found, self._held))
            or list(map(_is_trained, self._parameters)) != self._trained
            or self._found_at != self._addresses
        ):
            return self._change_text(found)
        return None

    @property
    def _found(self) -> list[Any]:
        # Not by names: lazy parameters are gathered where they are read so.
        return list(chain.from_iterable(map(dict.values, self._holders)))

    @property
    def _found_at(self) -> list[int]:
        placed = map(_torch_private.local_tensor, self._placed)
        return [*map(_address_of, self._addressed), *map(_address_of, placed)]

    def _change_text(self, found: list[Any]) -> str:
        replaced = (
            name for name, now, before in zip(self._names, found, self._held, strict=False) if now is not before
        )
        if len(found) == len(self._held) and (name := next(replaced, None)) is not None:
            return f"'{name}' was replaced"
        for tensor, address, before in zip(
            [*self._addressed, *self._placed], self._found_at, self._addresses, strict=True
        ):
            if address != before:
                return f"'{self._named[tensor]}' was given other data"
        for tensor, trained in zip(self._parameters, self._trained, strict=True):
            if tensor.requires_grad is not trained:
                return f"'{self._named[tensor]}' was {'frozen' if trained else 'unfrozen'}"
        return "A parameter, a buffer or a module was added to the model, or removed"


def _has_address(tensor: torch.Tensor) -> bool:
    # Ignored parameters may be of any kind.
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
