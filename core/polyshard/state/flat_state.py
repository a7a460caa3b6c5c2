"""The state of one flat parameter, put together from that of the parameters that it stands for."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import ConfigError
from .places import Holding
from .sharded import CheckpointTensor
from .source import Source, listed, opening, problem_with
from .state_tensors import fits, require_dtype


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
        *,
        numbers: Collection[str],
        beside: bool,
        rank: int,
    ) -> None:
        """Match the source with the flat parameter.

        Args:
            source: What is to be loaded.
            holding: A flat parameter.
            saved: By parameter name and name of the state, the source's key.
            present: What the optimizer has for it now; tensors that fit are filled in place.
            numbers: Names of states that are one number for a parameter, a scalar one too.
            beside: Whether scalars lie on the parameter's device.
            rank: For errors.

        Raises:
            ConfigError: the source's state is of another shape, or is there for some of the parameters only.
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
        found: dict[str, Any] = {}
        for keys in self._scalars.values():
            for key in keys.values():
                entry = self._source.entry(key)
                found[key] = None
                if isinstance(entry, TensorStorageMetadata):
                    found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return found

    def take_scalars(self, values: Mapping[str, Any]) -> None:
        """Take what was read into ``scalars``.

        Raises:
            ConfigError: two parameters have different values.
        """
        for name, keys in self._scalars.items():
            (first, key), *others = keys.items()
            for other, other_key in others:
                if not _same(values[key], values[other_key]):
                    raise ConfigError(
                        f"optimizer state '{name}' is {_shown(values[key])} for '{first}' but "
                        f"{_shown(values[other_key])} for '{other}' in {self._source.described}, and "
                        f"{self._holding.described} has one for both {self._where}. {_REMEDY}"
                    )
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
            place.name
            for place in self._holding.places
            if (place.slot.numel if self._source.complete else place.piece is not None)
        ]
        missing = [each for each in needed if each not in keys]
        if missing:
            raise ConfigError(
                f"{opening(self._source)} has optimizer state '{name}' of {listed(list(keys))} but "
                f"not of {listed(missing)}, and {self._holding.described} has it for all {self._where}. {_REMEDY}"
            )

    def _has_shapes(self, keys: Mapping[str, str]) -> bool:
        """Whether every parameter's entry has the shape of the parameter."""
        shapes = {place.name: place.slot.shape for place in self._holding.places}
        entries = {each: self._source.entry(key) for each, key in keys.items()}
        return all(
            isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == shapes[each]
            for each, entry in entries.items()
        )

    def _add_tensor(self, name: str, keys: Mapping[str, str]) -> None:
        parameter = self._holding.parameter
        dtype, *others = {entry.properties.dtype for entry in map(self._source.entry, keys.values()) if entry}
        if others:
            raise ConfigError(
                f"optimizer state '{name}' of {listed(list(keys))} has several dtypes in "
                f"{self._source.described}, but {self._holding.described} has one {self._where}. {_REMEDY}"
            )
        local = self._present.get(name)
        what = f"optimizer state '{name}' of {self._holding.described}"
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
            if isinstance(entry, TensorStorageMetadata) and math.prod(entry.size) != 1:
                raise ConfigError(
                    f"optimizer state '{name}' of '{each}' has shape {tuple(entry.size)} in "
                    f"{self._source.described}, neither a scalar nor the parameter's shape, so it is no state of "
                    f"{self._holding.described} {self._where}. {_REMEDY}"
                )
        self._scalars[name] = dict(keys)

    def _clear_padding(self, tensor: torch.Tensor) -> None:
        cursor = 0
        for place in self._holding.places:
            if place.piece is not None:
                tensor[cursor : place.piece.shard_offset].zero_()
                cursor = place.piece.shard_offset + place.piece.numel
        tensor[cursor:].zero_()


_REMEDY = "Give the optimizer model.parameters() instead."


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _shown(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)
