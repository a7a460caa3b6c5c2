"""The optimizer's state of flat parameters, put together from that of the parameters which they stand for."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..errors import ConfigError
from .sharded import CheckpointTensor, Holding
from .source import Source, fits, listed, opening, problem_with, require_dtype, require_like, same_values

#: For a flat parameter that differs from the parameters that it stands for.
_REMEDY = "Give the optimizer model.parameters() instead."


class FlatState:
    """State of one flat parameter on its way out of a source.

    Made before anything is read. ``targets`` are to be filled and ``scalars`` to be read and taken; ``finish`` then
    gives what belongs to the optimizer.
    """

    def __init__(
        self,
        source: Source,
        holding: Holding,
        saved: Mapping[str, Mapping[str, str]],
        present: Mapping[str, Any],
        numbers: Collection[str],
        rank: int,
        *,
        beside: bool,
    ) -> None:
        """Match ``source``, whose keys for each parameter and state are ``saved``, with a flat parameter.

        ``present``: the optimizer's state now; tensors that fit are filled in place. ``numbers``: names of states that
        are one number for a parameter, a scalar one too. ``beside``: whether scalars lie on the parameter's device.

        Raises ConfigError: the source's state is of another shape, or is there for some of the parameters only.
        """
        self._source = source
        self._holding = holding
        self._present = present
        self._beside = beside
        self._where = f"(rank {rank})"
        self.targets: dict[str, CheckpointTensor] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._scalars: dict[str, dict[str, str]] = {}
        self._agreed: dict[str, Any] = {}
        own = {each: saved.get(each, {}) for each in holding.names}
        for name in dict.fromkeys(name for states in own.values() for name in states):
            keys = {each: states[name] for each, states in own.items() if name in states}
            self._require_all(name, keys)
            if name not in numbers and self._has_shapes(keys):
                self._add_tensor(name, keys)
            else:
                self._add_scalar(name, keys)

    def scalars(self) -> dict[str, Any]:
        """Where values that the parameters share are to be read into, by key of the source."""
        return {key: self._source.blank(key) for keys in self._scalars.values() for key in keys.values()}

    def take_scalars(self, values: Mapping[str, Any]) -> None:
        """Take the values in ``scalars``. Raises ConfigError: two parameters differ in one, or it can be no state."""
        for name, keys in self._scalars.items():
            (first, key), *others = keys.items()
            for other, other_key in others:
                if not same_values(values[key], values[other_key]):
                    raise ConfigError(
                        f"optimizer state '{name}' is {_shown(values[key])} for '{first}' but "
                        f"{_shown(values[other_key])} for '{other}' in {self._source.label}, and "
                        f"{self._holding.label} has one for both {self._where}. {_REMEDY}"
                    )
            require_like(values[key], name, self._present, self._holding.label, self._source, self._where)
            self._agreed[name] = values[key]

    def finish(self) -> dict[str, Any]:
        """What the optimizer is to have, once ``targets`` are filled."""
        for tensor in self._tensors.values():
            self._clear_padding(tensor)
        state: dict[str, Any] = dict(self._tensors)
        for name, value in self._agreed.items():
            present = self._present.get(name)
            if not isinstance(value, torch.Tensor):
                state[name] = value
            elif fits(present, value.shape, value.dtype):
                # In place: a captured step reads it at this address.
                state[name] = present.detach().copy_(value)
            else:
                on_device = value.ndim > 0 or self._beside
                state[name] = value.to(self._holding.parameter.device) if on_device else value
        return state

    def _require_all(self, name: str, keys: Mapping[str, str]) -> None:
        # Empty parameters may have none: no rank has a part of them. One rank of a pretended world saved its own parts.
        needed = [
            each.name
            for each in self._holding.sharded
            if (each.slot.numel if self._source.complete else each.piece is not None)
        ]
        missing = [each for each in needed if each not in keys]
        if missing:
            raise ConfigError(
                f"{opening(self._source)} has optimizer state '{name}' of {listed(list(keys))} but "
                f"not of {listed(missing)}, and {self._holding.label} has it for all {self._where}. {_REMEDY}"
            )

    def _has_shapes(self, keys: Mapping[str, str]) -> bool:
        shapes = {each.name: each.shape for each in self._holding.sharded}
        entries = {each: self._source.entry(key) for each, key in keys.items()}
        return all(entry is not None and entry.shape == shapes[each] for each, entry in entries.items())

    def _add_tensor(self, name: str, keys: Mapping[str, str]) -> None:
        parameter = self._holding.parameter
        dtype, *others = {entry.dtype for entry in map(self._source.entry, keys.values()) if entry}
        if others:
            raise ConfigError(
                f"optimizer state '{name}' of {listed(list(keys))} has several dtypes in "
                f"{self._source.label}, but {self._holding.label} has one {self._where}. {_REMEDY}"
            )
        local = self._present.get(name)
        what = f"optimizer state '{name}' of {self._holding.label}"
        require_dtype(local, dtype, what, self._source, self._where)
        if not fits(local, parameter.shape, dtype):
            local = torch.zeros_like(parameter, dtype=dtype)
        self._tensors[name] = local.detach()
        for each, target in self._holding.parts(local).items():
            if each in keys:
                wrong = problem_with(
                    self._source, keys[each], f"optimizer state '{name}' of '{each}'", target, self._where
                )
                if wrong is not None:
                    raise ConfigError(wrong)
                self.targets[keys[each]] = target

    def _add_scalar(self, name: str, keys: Mapping[str, str]) -> None:
        for each, key in keys.items():
            entry = self._source.entry(key)
            if entry is not None and math.prod(entry.shape) != 1:
                raise ConfigError(
                    f"optimizer state '{name}' of '{each}' has shape {entry.shape} in "
                    f"{self._source.label}, neither a scalar nor the parameter's shape, so it is no state of "
                    f"{self._holding.label} {self._where}. {_REMEDY}"
                )
        self._scalars[name] = dict(keys)

    def _clear_padding(self, tensor: torch.Tensor) -> None:
        cursor = 0
        for piece in (each.piece for each in self._holding.sharded):
            if piece is not None:
                tensor[cursor : piece.shard_offset].zero_()
                cursor = piece.shard_offset + piece.numel
        tensor[cursor:].zero_()


def _shown(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
