"""From a state dict of the unwrapped model to one that a sharded model's optimizer loads."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import Collectives
from polyshard.planning.layout import Slot
from polyshard.runtime.gather import view_of
from torch import nn

from ._optim_names import WHOLE_FLAT, Flattened, Key, ModelNames, OptimStateKeyError, ordered_groups
from ._optim_values import collect, dtype_of, refuse_other_cut
from ._rows import shape_of

_ADVICE = "Load it into a model with use_orig_params=True, where each parameter keeps state of its own."


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """In the place of a tensor that rank 0 is going to send."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


class _Source(ABC):
    """Where the state to load comes from."""

    def __init__(self, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]] | None) -> None:
        #: By name. Tensors may be missing here: ``whole`` has them.
        self.state = state
        self.groups = groups

    @abstractmethod
    def whole(self, value: Any, flattened: Flattened) -> Any:
        """``value`` of ``state``, plain and whole if it is a tensor. All ranks ask for the same in the same order."""

    @abstractmethod
    def passed(self, value: Any) -> Any:
        """``value``, which belongs to no flat parameter, complete and apart from what the user gave."""


class _Given(_Source):
    """Every rank was given the state, or its own part of distributed tensors."""

    def whole(self, value: Any, flattened: Flattened) -> Any:
        return collect(value, flattened) if isinstance(value, torch.Tensor) else value

    def passed(self, value: Any) -> Any:
        return _replaced(value, _own_copy)


class _Sent(_Source):
    """Rank 0 was given the state, and sends one tensor at a time."""

    def __init__(self, given: Mapping[str, Any], home: Collectives | None, device: torch.device) -> None:
        self._home = home
        self._device = device
        self._tensors: list[torch.Tensor] = []
        answer: Any = None
        if home is None or home.rank == 0:
            answer = self._described(given), given.get("param_groups") if "state" in given else None
        if home is not None:
            answer = home.all_gather_object(answer)[0]
        state, groups = answer
        if state is None:
            raise _not_a_state_dict(0)
        super().__init__(state, groups)

    def _described(self, given: Mapping[str, Any]) -> Any:
        if "state" not in given:
            return None
        return {key: _replaced(value, self._await) for key, value in given["state"].items()}

    def _await(self, tensor: torch.Tensor) -> Any:
        if not tensor.dim():
            return tensor.detach().cpu()
        self._tensors.append(tensor)
        return _Awaited(len(self._tensors) - 1, tensor.shape, tensor.dtype)

    def whole(self, value: Any, flattened: Flattened) -> Any:
        return self._receive(value, flattened.device)

    def passed(self, value: Any) -> Any:
        return _replaced(value, _own_copy, lambda awaited: _own_copy(self._receive(awaited, self._device)))

    def _receive(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, _Awaited):
            return value
        if self._home is None or self._home.rank == 0:
            tensor = self._tensors[value.index].detach().to(device).contiguous()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        if self._home is not None:
            self._home.broadcast(tensor, 0).wait()
        return tensor


def shard_optim_state(
    names: ModelNames,
    optim_state_dict: Mapping[str, Any] | None,
    keys: Mapping[Key, nn.Parameter],
    home: Collectives | None,
    *,
    rank0_only: bool,
    optim: torch.optim.Optimizer | None,
    named: bool,
) -> dict[str, Any]:
    """This rank's part of a state dict of the unwrapped model, under ``keys``.

    Args:
        names: Of the model.
        optim_state_dict: By parameter names. Tensors are whole, or distributed along their first dimension.
        keys: Which parameters the optimizer's keys stand for.
        home: The ranks that call this together; None for this one alone.
        rank0_only: Rank 0 alone has it, and sends it to the others.
        optim: The optimizer, where there is one.
        named: Its state is keyed by names, and has entries for parameters of which this rank has no element.

    Raises:
        ConfigError: (a ``ValueError``) no state dict, or state that does not fit the parameters.
        OptimStateKeyError: (a ``KeyError``) it names parameters that are not the optimizer's, or names none.
    """
    source: _Source
    if rank0_only:
        source = _Sent(optim_state_dict or {}, home, names.device)
    elif optim_state_dict is None or "state" not in optim_state_dict:
        raise _not_a_state_dict(names.rank)
    else:
        source = _Given(optim_state_dict["state"], optim_state_dict.get("param_groups"))
    key_of = {parameter: key for key, parameter in keys.items()}
    key_named = {name: key for parameter, key in key_of.items() for name in names.names_of(parameter)}
    groups = None if source.groups is None else _keyed_groups(names, source.groups, key_named, optim, named=named)
    entries = _by_first_name(names, source.state)
    for flattened in names.flattened:
        _check(flattened, entries)
    loaded: dict[Any, Any] = {}
    for parameter, (flattened, slot) in names.managed.items():
        if slot == WHOLE_FLAT:
            sharded = _flat_state(flattened, entries, source)
        else:
            sharded = _original_state(flattened, slot, entries.get(flattened.names[slot]), source)
        key = key_of.get(parameter)
        if key is None:
            continue
        if sharded:
            loaded[key] = sharded
        elif named and optim is not None and flattened.names[slot] in entries:
            _keep_own(loaded, key, parameter, optim, flattened, slot)
    for name, parameter in names.plain.items():
        if name in entries:
            passed = source.passed(entries[name])
            if parameter in key_of:
                loaded[key_of[parameter]] = passed
    for key, value in source.state.items():
        if key not in names.first:
            loaded[key] = source.passed(value)
    return {"state": loaded} if groups is None else {"state": loaded, "param_groups": groups}


def _not_a_state_dict(rank: int) -> ConfigError:
    return ConfigError(
        '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict, and on rank '
        f"{rank} it has not. Pass what optim_state_dict returned."
    )


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    # An optimizer writes into what it loaded. Distributed tensors of other packages are theirs to copy.
    return tensor.detach().clone() if type(tensor) is torch.Tensor else tensor


def _replaced(value: Any, tensor: Any, awaited: Any = None) -> Any:
    """``value`` with what ``tensor`` and ``awaited`` make of the tensors and placeholders inside its containers."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, _Awaited):
        return awaited(value)
    if isinstance(value, dict):
        return {key: _replaced(item, tensor, awaited) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, tensor, awaited) for item in value)
    return value


def _keyed_groups(
    names: ModelNames,
    saved: Sequence[Mapping[str, Any]],
    key_named: Mapping[str, Key],
    optim: torch.optim.Optimizer | None,
    *,
    named: bool,
) -> list[dict[str, Any]]:
    keyed: list[list[Key]] = []
    for group in saved:
        found: dict[Key, None] = {}
        for name in group["params"]:
            key = key_named.get(names.first.get(name, name))
            if key is None:
                raise OptimStateKeyError(
                    f"Can't find {name} from {list(key_named)} (rank {names.rank}). Load into an optimizer of the same "
                    "parameters; a state dict that is keyed by positions must go through rekey_optim_state_dict first."
                )
            found[key] = None
        keyed.append(sorted(found, key=lambda key: (isinstance(key, str), key)))
    groups = []
    for index, (group, keys) in enumerate(ordered_groups(saved, keyed, None if named else optim)):
        settings = copy.deepcopy(
            {name: value for name, value in group.items() if name not in ("params", "param_names")}
        )
        own = optim.param_groups[index] if optim is not None and index < len(optim.param_groups) else {}
        if "param_names" in own:
            settings["param_names"] = list(own["param_names"])
        groups.append({**settings, "params": list(keys)})
    return groups


def _by_first_name(names: ModelNames, state: Mapping[Any, Any]) -> dict[str, Mapping[str, Any]]:
    entries: dict[str, Mapping[str, Any]] = {}
    for key, value in state.items():
        if isinstance(key, int):
            raise OptimStateKeyError(
                f"Can't find {key} from {list(names.first)} (rank {names.rank}). A state dict that is keyed by "
                "positions must go through rekey_optim_state_dict first."
            )
        first = names.first.get(key)
        # An entry without anything in it is none: optimizers that look a state up leave such behind.
        if first is not None and value:
            entries.setdefault(first, value)
    return entries


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, _Awaited)) and len(shape_of(value)) > 0


def _check(flattened: Flattened, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse state that does not fit, before anything is sent."""
    rank = flattened.instance.rank
    having = [(name, entries[name]) for name in flattened.names if name in entries]
    for index, name in enumerate(flattened.names):
        shape = torch.Size(flattened.layout.slots[index].shape)
        for value in entries.get(name, {}).values():
            if _is_tensor(value) and shape_of(value) != shape:
                raise ConfigError(
                    f"Tensor optimizer state does not have same shape as its parameter: {shape_of(value)} {shape} "
                    f"for '{name}' on rank {rank}. Load the state of the same model."
                )
            refuse_other_cut(value, flattened, name)
    if flattened.handle.use_orig_params or not having:
        return
    state_names = set(having[0][1])
    for name, state in having:
        if set(state) != state_names:
            raise ConfigError(
                f"Differing optimizer state names for the unflattened parameters: {sorted(state_names)} for "
                f"'{having[0][0]}' and {sorted(state)} for '{name}' on rank {rank}, of one flat parameter. {_ADVICE}"
            )
    for state_name in sorted(state_names):
        _check_alike(flattened, state_name, [state[state_name] for _, state in having])


def _check_alike(flattened: Flattened, state_name: str, values: Sequence[Any]) -> None:
    where = f"{list(flattened.names)} on rank {flattened.instance.rank}"
    present = [value for value in values if value is not None]
    if not present:
        return
    if len({_is_tensor(value) for value in present}) > 1 or len({_kind(value) for value in present}) > 1:
        raise ConfigError(
            f"Differing optimizer state types for state {state_name} of the parameters {where}: "
            f"{sorted({_kind(value) for value in present})}. They share a flat parameter. {_ADVICE}"
        )
    if _is_tensor(present[0]):
        dtypes = {dtype_of(value) for value in present}
        if len(dtypes) > 1:
            raise ConfigError(
                "All unflattened parameters comprising a single flat parameter must have positive-dimension tensor "
                f"state with the same dtype but got dtypes {dtypes} for state {state_name} of {where}. {_ADVICE}"
            )
        return
    scalars = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    if len(values) < len(flattened.names) or any(repr(scalar) != repr(scalars[0]) for scalar in scalars):
        raise ConfigError(
            "All unflattened parameters comprising a single flat parameter must have scalar state with the same value "
            f"and dtype but got values {scalars} for state {state_name} of {where}. {_ADVICE}"
        )


def _kind(value: Any) -> str:
    if isinstance(value, (torch.Tensor, _Awaited)):
        return "tensor" if _is_tensor(value) else f"scalar of {value.dtype}"
    return type(value).__name__


def _flat_state(flattened: Flattened, entries: Mapping[str, Mapping[str, Any]], source: _Source) -> dict[str, Any]:
    """The flat parameter's own shard of every kind of state; zeros where a parameter has none."""
    having = {index: entries[name] for index, name in enumerate(flattened.names) if name in entries}
    if not having:
        return {}
    pieces = {piece.slot: piece for piece in flattened.unit.pieces}
    given = next(iter(having.values()))
    state: dict[str, Any] = {}
    # Sorted, for all ranks send alike whatever the order of their dicts.
    for name in sorted(given):
        shard: torch.Tensor | None = None
        for index, values in having.items():
            value = source.whole(values[name], flattened)
            if not _is_tensor(value):
                if value is not None or name not in state:
                    state[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
                continue
            if shard is None:
                shard = torch.zeros(flattened.layout.shard_numel, dtype=value.dtype, device=value.device)
                state[name] = shard
            piece = pieces.get(index)
            if piece is not None:
                flat = _in_storage_order(value, flattened.layout.slots[index])
                shard.narrow(0, piece.shard_offset, piece.numel).copy_(flat[piece.start : piece.stop])
    return {name: state[name] for name in given}


def _original_state(
    flattened: Flattened, slot: int, entries: Mapping[str, Any] | None, source: _Source
) -> dict[str, Any]:
    """The state of this rank's elements of a parameter; nothing where it has none."""
    piece = next((piece for piece in flattened.unit.pieces if piece.slot == slot), None)
    place = flattened.layout.slots[slot]
    given = entries or {}
    state: dict[str, Any] = {}
    for name in sorted(given):
        value = source.whole(given[name], flattened)
        if _is_tensor(value):
            flat = _in_storage_order(value, place)
            if flattened.is_cut:
                # A copy, or the whole would live as long as the optimizer.
                value = flat[piece.start : piece.stop].clone() if piece is not None else None
            else:
                value = view_of(flat, place.shape, place.stride, 0)
        elif isinstance(value, torch.Tensor):
            value = value.detach().clone()
        state[name] = value
    return {name: state[name] for name in given} if piece is not None or not place.numel else {}


def _in_storage_order(value: torch.Tensor, slot: Slot) -> torch.Tensor:
    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
    return dense.as_strided((slot.numel,), (1,))


def _keep_own(
    loaded: dict[Any, Any],
    key: Key,
    parameter: nn.Parameter,
    optim: torch.optim.Optimizer,
    flattened: Flattened,
    slot: int,
) -> None:
    """Let an optimizer that wants an entry for every parameter find the one that it has."""
    own = optim.state.get(parameter)
    if own is not None:
        loaded[key] = copy.deepcopy(own)
    else:
        warnings.warn(f"optim_state[{flattened.names[slot]}] is not on rank{flattened.instance.rank}.", stacklevel=6)
