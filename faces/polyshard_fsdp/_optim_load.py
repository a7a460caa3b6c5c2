"""Optimizer state dicts of the unwrapped model, for a sharded model's optimizer and for one that is not sharded."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from polyshard.errors import ConfigError
from polyshard.extension import view_of
from polyshard.interfaces import Collectives
from torch import nn
from torch.distributed.tensor import DTensor

from . import _torch_private
from ._collectives import collectives_of
from ._common_utils import _get_param_to_fqns
from ._optim_utils import (
    WHOLE_FLAT,
    Flattened,
    Key,
    ModelNames,
    OptimInput,
    OptimStateKeyError,
    home_of,
    positions_of,
    settings_in,
)
from ._shard_utils import gather_rows, refuse_other_cut, shape_of

_ADVICE = "Load it into a model with use_orig_params=True, where each parameter keeps state of its own."


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """In the place of a tensor that rank 0 is going to send."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


class _Source:
    """The state to load, which every rank was given, or rank 0 alone, which then sends one tensor at a time."""

    def __init__(
        self, given: Mapping[str, Any] | None, home: Collectives | None, device: torch.device, *, sent: bool
    ) -> None:
        self._home = home if sent else None
        self._device = device
        self._tensors: list[torch.Tensor] = []
        answer: Any = (None, None)
        if given is not None and "state" in given:
            state = given["state"]
            if sent:
                state = {key: _replaced(value, self._await) for key, value in state.items()}
            answer = state, given.get("param_groups")
        if self._home is not None:
            answer = self._home.all_gather_object(answer if self._home.rank == 0 else None)[0]
        #: By name. Tensors may be missing here: ``whole`` has them.
        self.state: Mapping[Any, Any] = answer[0]
        self.groups: Sequence[Mapping[str, Any]] | None = answer[1]
        if self.state is None:
            raise ConfigError(
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict, and it has not. Pass '
                "what optim_state_dict returned."
            )

    def _await(self, tensor: torch.Tensor) -> Any:
        if not tensor.dim():
            return tensor.detach().cpu()
        self._tensors.append(tensor)
        return _Awaited(len(self._tensors) - 1, tensor.shape, tensor.dtype)

    def whole(self, value: Any, flattened: Flattened) -> Any:
        """``value`` of ``state``, plain and whole if it is a tensor. All ranks ask for the same in the same order."""
        if isinstance(value, _Awaited):
            return self._receive(value, flattened.unit.spec.device)
        return _collect(value, flattened) if isinstance(value, torch.Tensor) else value

    def passed(self, value: Any) -> Any:
        """``value``, which belongs to no flat parameter, complete and apart from what the user gave."""
        return _replaced(value, _own_copy, lambda awaited: _own_copy(self._receive(awaited, self._device)))

    def _receive(self, value: _Awaited, device: torch.device) -> torch.Tensor:
        if self._home is None or self._home.rank == 0:
            tensor = self._tensors[value.index].detach().to(device).contiguous()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        if self._home is not None:
            self._home.broadcast(tensor, 0).wait()
        return tensor


@torch.no_grad()
def load(
    model: nn.Module,
    optim_state_dict: Mapping[str, Any] | None,
    optim: torch.optim.Optimizer | None,
    group: Any = None,
    optim_input: OptimInput = None,
    *,
    rank0_only: bool = False,
    named: bool = False,
) -> dict[str, Any]:
    """This rank's part of a state dict of the unwrapped model, as ``optim.load_state_dict`` takes it.

    The number of ranks, the sharding strategy and ``use_orig_params`` may be others than those of the model that was
    saved; so may be a model that was never sharded, once its state is keyed by names.

    Args:
        model: An FSDP instance, or a module with some inside. All ranks call this together.
        optim_state_dict: By parameter names. Tensors are whole, or distributed along their first dimension.
        optim: The optimizer, where there is one.
        group: The ranks that call this; None for the default group.
        optim_input: What the optimizer was constructed with, in the place of ``optim``.
        rank0_only: Rank 0 alone has the state dict, and sends it to the others.
        named: ``optim`` keys its state by names, and wants an entry for every parameter.

    Raises:
        ConfigError: (a ``ValueError``) no state dict, or state that does not fit the parameters.
        OptimStateKeyError: (a ``KeyError``) it names parameters that are not the optimizer's, or names none.
    """
    names = ModelNames(model)
    keys = names.keys_of(model, optim, optim_input, named=named)
    optim = None if optim_input is not None else optim
    source = _Source(optim_state_dict, home_of(group, names) if rank0_only else None, names.device, sent=rank0_only)
    key_of = {parameter: key for key, parameter in keys.items()}
    key_named = {name: key for parameter, key in key_of.items() for name in names.names_of(parameter)}
    groups = None if source.groups is None else _keyed_groups(names, source.groups, key_named, optim, named=named)
    entries = _by_first_name(names, source.state)
    for flattened in names.flattened:
        _check(flattened, entries)
    loaded: dict[Any, Any] = {}
    for parameter, (flattened, index) in names.managed.items():
        if index == WHOLE_FLAT:
            sharded = _flat_state(flattened, entries, source)
        else:
            sharded = _original_state(flattened, index, entries.get(flattened.names[index], {}), source)
        key = key_of.get(parameter)
        if key is None:
            continue
        if sharded:
            loaded[key] = sharded
        elif named and optim is not None and flattened.names[index] in entries:
            # An optimizer that wants an entry for every parameter shall find the one that it has.
            if parameter in optim.state:
                loaded[key] = copy.deepcopy(optim.state[parameter])
            else:
                warnings.warn(f"optim_state[{flattened.names[index]}] is not on rank{names.rank}.", stacklevel=4)
    for name, parameter in names.plain.items():
        if name in entries:
            passed = source.passed(entries[name])
            if parameter in key_of:
                loaded[key_of[parameter]] = passed
    for key, value in source.state.items():
        if key not in names.first:
            loaded[key] = source.passed(value)
    return {"state": loaded} if groups is None else {"state": loaded, "param_groups": groups}


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


def _collect(value: torch.Tensor, flattened: Flattened) -> torch.Tensor:
    """The whole of ``value``, on every rank that has a part of it; a plain tensor is whole already.

    Every rank of the instance's group must call this, in the same order.
    """
    if isinstance(value, DTensor):
        # Offloaded values keep the mesh of the device where they were gathered.
        on_mesh: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
        return on_mesh.full_tensor()
    if not _torch_private.is_sharded_tensor(value):
        return value
    collectives = collectives_of(flattened.instance.process_group, flattened.unit.spec.device)
    return gather_rows([value], collectives, _dtype_of(value), flattened.unit.spec.device)[0]


def _dtype_of(value: Any) -> torch.dtype:
    if _torch_private.is_sharded_tensor(value):
        value = value.metadata().tensor_properties
    found: torch.dtype = value.dtype
    return found


def _keyed_groups(
    names: ModelNames,
    saved: Sequence[Mapping[str, Any]],
    key_named: Mapping[str, Key],
    optim: torch.optim.Optimizer | None,
    *,
    named: bool,
) -> list[dict[str, Any]]:
    """Saved parameter groups under ``optim``'s keys, in its order where it has groups of the same parameters.

    ``load_state_dict`` matches groups, and parameters inside them, by position alone.
    """
    keyed: list[tuple[Mapping[str, Any], list[Key]]] = []
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
        keyed.append((group, sorted(found, key=lambda key: (isinstance(key, str), key))))
    if optim is not None and not named:
        positions = itertools.count()
        wanted = [frozenset[Key](next(positions) for _ in own["params"]) for own in optim.param_groups]
        by_keys = {frozenset(keys): (group, keys) for group, keys in keyed}
        if len(by_keys) == len(keyed) and set(by_keys) == set(wanted):
            keyed = [by_keys[each] for each in wanted]
    groups = []
    for index, (group, keys) in enumerate(keyed):
        settings = settings_in(group)
        settings.pop("param_names", None)
        own = optim.param_groups[index] if optim is not None and index < len(optim.param_groups) else {}
        if "param_names" in own:
            settings["param_names"] = list(own["param_names"])
        groups.append({**settings, "params": keys})
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
        # Optimizers that look a state up leave empty entries behind.
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
        part = flattened.unit.handle.parameters[index].part
        shape = torch.Size(flattened.unit.layout.slots[index].shape if part is None else part.shape)
        for value in entries.get(name, {}).values():
            if _is_tensor(value) and shape_of(value) != shape:
                raise ConfigError(
                    f"Tensor optimizer state does not have same shape as its parameter: {shape_of(value)} {shape} "
                    f"for '{name}' on rank {rank}. Load the state of the same model."
                )
            refuse_other_cut(value, flattened.instance.world_size, f"Optimizer state of '{name}'", rank)
    if flattened.unit.handle.use_orig_params or not having:
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
    """Refuse state of one flat parameter's parameters that cannot be that of one tensor."""
    where = f"{list(flattened.names)} on rank {flattened.instance.rank}. {_ADVICE}"
    present = [value for value in values if value is not None]
    kinds = sorted(set(map(_kind, present)))
    if len(kinds) > 1:
        raise ConfigError(
            f"Differing optimizer state types for state {state_name} of the parameters of one flat parameter: {kinds} "
            f"of {where}"
        )
    if present and not _is_tensor(present[0]):
        scalars = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        if len(values) < len(flattened.names) or len(set(map(repr, scalars))) > 1:
            raise ConfigError(
                "All unflattened parameters comprising a single flat parameter must have scalar state with the same "
                f"value and dtype but got values {scalars} for state {state_name} of {where}"
            )


def _kind(value: Any) -> str:
    if isinstance(value, (torch.Tensor, _Awaited)):
        return f"{'tensor' if _is_tensor(value) else 'scalar'} of {_dtype_of(value)}"
    return type(value).__name__


def _flat_state(flattened: Flattened, entries: Mapping[str, Mapping[str, Any]], source: _Source) -> dict[str, Any]:
    """The flat parameter's own shard of every kind of state; zeros where a parameter has none."""
    pieces = {piece.slot: piece for piece in flattened.unit.pieces}
    state: dict[str, Any] = {}
    for index, first in enumerate(flattened.names):
        for name, value in _own_elements(flattened, index, entries.get(first, {}), source).items():
            if not _is_tensor(value):
                if value is not None or name not in state:
                    state[name] = value
                continue
            if name not in state:
                numel = flattened.unit.layout.shard_numel
                state[name] = torch.zeros(numel, dtype=value.dtype, device=value.device)
            if index in pieces:
                state[name].narrow(0, pieces[index].shard_offset, value.numel()).copy_(value)
    return state


def _original_state(flattened: Flattened, index: int, given: Mapping[str, Any], source: _Source) -> dict[str, Any]:
    """The state of this rank's elements of a parameter; nothing where it has none."""
    slot = flattened.unit.layout.slots[index]
    state = _own_elements(flattened, index, given, source)
    if not flattened.is_cut:
        shape, stride = slot.shape, slot.stride
        return {name: view_of(each, shape, stride, 0) if _is_tensor(each) else each for name, each in state.items()}
    return state if not slot.numel or any(piece.slot == index for piece in flattened.unit.pieces) else {}


def _own_elements(flattened: Flattened, index: int, given: Mapping[str, Any], source: _Source) -> dict[str, Any]:
    """A copy of a parameter's state, with tensors (``[piece.numel]``) of this rank's elements in storage order."""
    unit = flattened.unit
    slot, part = unit.layout.slots[index], unit.handle.parameters[index].part
    start, stop = next(((piece.start, piece.stop) for piece in unit.pieces if piece.slot == index), (0, 0))
    state: dict[str, Any] = {}
    # Sorted, for all ranks send alike whatever the order of their dicts.
    for name in sorted(given):
        value = source.whole(given[name], flattened)
        if _is_tensor(value):
            value = value if part is None else part.cut(value)
            dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
            value = dense.as_strided((slot.numel,), (1,))
            if stop - start < slot.numel:
                # A copy, or the whole would live as long as the optimizer.
                value = value[start:stop].clone()
        elif isinstance(value, torch.Tensor):
            value = value.detach().clone()
        state[name] = value
    return {name: state[name] for name in given}


def rekey(
    optim_state_dict: dict[str, Any],
    to_names: bool,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """``optim_state_dict`` keyed by parameter names, or by positions in the optimizer of ``model``.

    Raises:
        ConfigError: (a ``ValueError``) some keys are names and others positions.
        OptimStateKeyError: (a ``KeyError``) a key that stands for no parameter of the optimizer.
    """
    state = optim_state_dict["state"]
    kinds = {type(key) for key in state}
    if len(kinds) > 1 and kinds & {str, int}:
        raise ConfigError(
            f"Invalid parameter keys: {list(state)}. They must all be parameter names, or all be positions."
        )
    if not kinds - {str if to_names else int}:
        return optim_state_dict
    names = {parameter: found[0] for parameter, found in _get_param_to_fqns(model).items()}
    wanted: dict[Key, Key] = {}
    for position, parameter in positions_of(model, optim, optim_input).items():
        name = names.get(parameter)
        if name is None:
            raise OptimStateKeyError(
                f"Can't find parameter {position} of the optimizer, of shape {tuple(parameter.shape)}, from "
                f"{list(names.values())}. Pass the optimizer of this model."
            )
        wanted.update({position: name} if to_names else {name: position})

    def renamed(key: Key) -> Key:
        if key not in wanted:
            raise OptimStateKeyError(
                f"Can't find {key} from {list(wanted)}. Pass the optimizer that has this parameter."
            )
        return wanted[key]

    groups = []
    for group in optim_state_dict["param_groups"]:
        keys = [renamed(key) for key in group["params"]]
        # An optimizer matches parameters by their order alone.
        groups.append({**settings_in(group), "params": keys if to_names else sorted(keys)})
    return {"state": {renamed(key): value for key, value in state.items()}, "param_groups": groups}
