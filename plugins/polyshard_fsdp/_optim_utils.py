"""Optimizer state dicts of FSDP instances, in the form that the state dict type says."""

from __future__ import annotations

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from polyshard.errors import ConfigAssertionError, ConfigError, ConfigTypeError, RankMismatchError, StateError
from polyshard.extension import FlatLayout, Slot, gather_whole, map_tensors, view_of
from polyshard.interfaces import Collectives
from torch import nn
from torch.distributed.tensor import DTensor

from . import _state_dict_utils, _torch_private
from ._collectives import collectives_of
from ._common_utils import _get_param_to_fqns, clean_tensor_name
from ._flat_param import FlatParamHandle
from ._shard_utils import cut_otherwise, gather_rows, own_rows, shape_of
from ._state import FSDPInstance
from ._traversal_utils import _get_fsdp_states_with_modules
from ._unit import FlatUnit
from .api import StateDictSettings, StateDictType


@torch.no_grad()
def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: Mapping[str, Any] | None, group: Any
) -> dict[str, Any]:
    """The state of ``optim`` under the names, and in the shapes, of the unwrapped model.

    Args:
        model: An FSDP instance, or a module with some inside. All ranks call this together.
        optim: An optimizer of its parameters.
        optim_state_dict: What to convert instead of ``optim.state_dict()``.
        group: The ranks that call this; None for the default group.

    Returns:
        With ``FULL_STATE_DICT``, whole tensors; with ``rank0_only``, on ranks other than 0, an empty dict. With the
        other two types a ``ShardedTensor`` for each, or a ``DTensor`` where the instances have a mesh; where nothing is
        cut, whole tensors too.

    Raises:
        StateError: (a ``RuntimeError``) ``LOCAL_STATE_DICT`` with a device mesh.
        ConfigError, OptimStateKeyError, RankMismatchError: state and parameters do not fit; before any of the state is
            sent.
    """
    names = ModelNames(model)
    settings = _settings(model, names)
    config = settings.optim_state_dict_config
    given: Mapping[str, Any] = optim.state_dict() if optim_state_dict is None else optim_state_dict
    form = Form(
        distributed=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        offload=config.offload_to_cpu,
        rank0_only=getattr(config, "rank0_only", False),
    )
    return gather_optim_state(names, given, keys_of(optim, names, named=is_keyed_by_name(given)), group, form)


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any],
    is_named_optimizer: bool,
    load_directly: bool,
    group: Any,
) -> dict[str, Any]:
    """What ``optim_state_dict`` returned, as ``optim.load_state_dict`` takes it on this rank.

    The number of ranks, the sharding strategy and ``use_orig_params`` may be others than those of the model that was
    saved; so may be a model that was never sharded, once its state is keyed by names.

    Args:
        model: An FSDP instance, or a module with some inside. All ranks call this together.
        optim: An optimizer of its parameters.
        optim_state_dict: Keyed by names. With ``rank0_only`` in the settings, rank 0's is used and sent to the others.
        is_named_optimizer: ``optim`` keys its state by names, and wants an entry for every parameter.
        load_directly: Load it, too.
        group: The ranks that call this; None for the default group.

    Raises:
        ConfigError: (a ``ValueError``) without "state", or with state that does not fit the parameters.
        OptimStateKeyError: (a ``KeyError``) for other parameters.
    """
    names = ModelNames(model)
    settings = _settings(model, names)
    result = shard_optim_state(
        names,
        optim_state_dict,
        keys_of(optim, names, named=is_named_optimizer),
        home_of(group, names),
        rank0_only=getattr(settings.optim_state_dict_config, "rank0_only", False),
        optim=optim,
        named=is_named_optimizer,
    )
    if load_directly:
        optim.load_state_dict(result)
    return result


def _settings(model: nn.Module, names: ModelNames) -> StateDictSettings:
    settings = _state_dict_utils._get_state_dict_type(model)
    meshed = any(each.instance._device_mesh is not None for each in names.flattened)
    if meshed and settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise StateError(
            "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please set "
            f"state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict (rank {names.rank})."
        )
    return settings


# From the optimizer of a sharded model to a state dict of the unwrapped model.


_COMPARABLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Form:
    """What a gathered state dict is to look like."""

    distributed: bool
    """Tensors are cut along their first dimension, one chunk a rank; else whole."""
    offload: bool
    """Tensors are in host memory."""
    rank0_only: bool
    """Ranks other than the group's first get an empty dict."""


class _TensorState(NamedTuple):
    """In a description of state, a tensor of the parameter's shape."""

    dtype: torch.dtype


#: The state of one parameter without its tensors, which are too large to be sent along.
_Description = dict[str, Any]


def gather_optim_state(
    names: ModelNames,
    optim_state_dict: Mapping[str, Any],
    keys: Mapping[Key, nn.Parameter],
    group: Any,
    form: Form,
) -> dict[str, Any]:
    """``optim_state_dict`` under the names, and in the shapes, of the unwrapped model.

    Args:
        names: Of the model.
        optim_state_dict: What an optimizer's ``state_dict()`` returned on this rank.
        keys: Which parameters its keys stand for.
        group: The ranks that call this together; None for the default group.
        form: What comes out.

    Raises:
        ConfigError: (a ``ValueError``) on every rank, where state on one has not the shape of its parameter.
        RankMismatchError: (a ``RuntimeError``) on every rank, where state is missing on some, or differs.
    """
    home = home_of(group, names)
    state = optim_state_dict["state"]
    own = {parameter: state[key] for key, parameter in keys.items() if key in state}
    managed: dict[Flattened, dict[int, Mapping[str, Any]]] = {}
    plain: dict[str, Mapping[str, Any]] = {}
    for parameter, entries in own.items():
        found = names.managed.get(parameter)
        if found is not None:
            managed.setdefault(found[0], {})[found[1]] = entries
        else:
            plain[names.names_of(parameter)[0]] = entries
    order, wanted = _agree(home, names, keys, own)
    rank = home.rank if home is not None else 0
    saves = form.distributed or not form.rank0_only or rank == 0
    descriptions = _exchange(names, managed)
    gathered: dict[str, dict[str, Any]] = {}
    for flattened in names.flattened:
        if wanted is None or flattened.names in wanted:
            gathered.update(
                _gather_flat(flattened, managed.get(flattened, {}), descriptions[flattened], form, saves=saves)
            )
    if not saves:
        return {}
    ordered: dict[str, Any] = {}
    for each in order:
        for name in each:
            if name in gathered:
                ordered[name] = gathered[name]
            elif name in plain and (wanted is None or (name,) in wanted):
                ordered[name] = _copied(plain[name], form)
    for name, entries in gathered.items():
        ordered.setdefault(name, entries)
    for key, value in state.items():
        if key not in keys:
            _warn_about_unknown(key)
            ordered[key] = value
    result: dict[str, Any] = {"state": ordered}
    if "param_groups" in optim_state_dict:
        result["param_groups"] = [_named_group(group, keys, names) for group in optim_state_dict["param_groups"]]
    return result


def home_of(group: Any, names: ModelNames) -> Collectives | None:
    """The ranks that save or load together; None for this one alone."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None and names.flattened:
        group = names.flattened[0].instance.process_group
    if group is None or group.size() == 1:
        return None
    return collectives_of(group, names.device)


def _agree(
    home: Collectives | None,
    names: ModelNames,
    keys: Mapping[Key, nn.Parameter],
    own: Mapping[nn.Parameter, Mapping[str, Any]],
) -> tuple[list[tuple[str, ...]], set[tuple[str, ...]] | None]:
    """Refuse, on all ranks alike, state that cannot be gathered.

    Returns the parameters in the order of the first rank's optimizer, then those that others alone have: who sends
    each entry of a distributed state dict around must meet them in one order, and optimizers may differ in theirs. And
    which parameters' state is wanted, None for all that any rank has: flat parameters have state on every rank, the
    parameters that view them only where they have elements.
    """
    order = list(map(names.names_of, keys.values()))
    mine = {names.names_of(parameter): _misshapen(names, parameter, entries) for parameter, entries in own.items()}
    answers = home.all_gather_object((order, mine)) if home is not None else [(order, mine)]
    order = list(dict.fromkeys(each for theirs, _ in answers for each in theirs))
    everyone = [theirs for _, theirs in answers]
    for rank, theirs in enumerate(everyone):
        for each, problem in theirs.items():
            if problem is not None:
                raise ConfigError(
                    f"Tensor optimizer state does not have same shape as its parameter: {problem} for '{each[0]}' on "
                    f"rank {rank}. Only state of the parameter's own shape, and scalars, can be sharded with it."
                )
    if any(flattened.handle.use_orig_params for flattened in names.flattened):
        return order, None
    wanted = list(everyone[0])
    missing = {rank: [each for each in wanted if each not in theirs] for rank, theirs in enumerate(everyone)}
    if any(missing.values()):
        lines = "".join(
            f"\nRank {rank} is missing states for the parameters: {absent}"
            for rank, absent in missing.items()
            if absent
        )
        raise RankMismatchError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            f"some ranks are missing some of those states{lines}\nStep every rank's optimizer alike before saving."
        )
    return order, set(wanted)


def _misshapen(names: ModelNames, parameter: nn.Parameter, entries: Mapping[str, Any]) -> str | None:
    found = names.managed.get(parameter)
    if found is None:
        return None
    shape = torch.Size([found[0].layout.shard_numel]) if found[1] == WHOLE_FLAT else parameter.shape
    for value in entries.values():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() != shape.numel():
            return f"{value.shape} {shape}"
    return None


def _exchange(
    names: ModelNames, managed: Mapping[Flattened, Mapping[int, Mapping[str, Any]]]
) -> dict[Flattened, list[Mapping[int, _Description]]]:
    """Of each flat parameter, what state each rank of its group has, in rank order."""
    groups: dict[Any, list[Flattened]] = {}
    for flattened in names.flattened:
        groups.setdefault(flattened.instance.process_group if flattened.is_cut else None, []).append(flattened)
    found: dict[Flattened, list[Mapping[int, _Description]]] = {}
    for members in groups.values():
        mine = [
            {slot: _describe(entries) for slot, entries in managed.get(flattened, {}).items()} for flattened in members
        ]
        shard = members[0].unit.grid.shard
        everyone = shard.all_gather_object(mine) if shard is not None else [mine]
        for index, flattened in enumerate(members):
            found[flattened] = [theirs[index] for theirs in everyone]
    return found


def _describe(entries: Mapping[str, Any]) -> _Description:
    described: _Description = {}
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            described[name] = _TensorState(value.dtype) if value.dim() else value.detach().clone().cpu()
        else:
            described[name] = value
    return described


def _gather_flat(
    flattened: Flattened,
    own: Mapping[int, Mapping[str, Any]],
    everyone: list[Mapping[int, _Description]],
    form: Form,
    *,
    saves: bool,
) -> dict[str, dict[str, Any]]:
    """The whole state of each parameter in one flat parameter, by name; a parameter without state is left out."""
    slots = range(len(flattened.layout.slots))
    described = {slot: _merge(flattened, slot, everyone) for slot in slots}
    # A plain optimizer that loads this counts in the very tensors: no two parameters may share one.
    results = {slot: copy.deepcopy(description) for slot, description in described.items() if description is not None}
    wanted = sorted(
        {
            (name, str(value.dtype), value.dtype)
            for description in results.values()
            for name, value in description.items()
            if isinstance(value, _TensorState)
        }
    )
    for name, _, dtype in wanted:
        whole = _whole_state(flattened, own, name, dtype)
        if not saves:
            continue
        for slot, result in results.items():
            if _is_tensor_of(result.get(name), dtype):
                place = flattened.layout.slots[slot]
                view = view_of(whole, place.shape, place.stride, place.offset)
                if form.distributed and flattened.is_cut:
                    result[name] = distribute(view, flattened, offload=form.offload)
                else:
                    # Cloned first: each would keep the memory of all, and be saved with it.
                    result[name] = view.clone().cpu() if form.offload else view.clone()
    return {flattened.names[slot]: result for slot, result in results.items()} if saves else {}


def _is_tensor_of(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, _TensorState) and value.dtype == dtype


def _merge(flattened: Flattened, slot: int, everyone: list[Mapping[int, _Description]]) -> _Description | None:
    """What state a parameter has, from the ranks that have elements of it: others' scalars may be stale."""
    merged: _Description | None = None
    ranks: Iterable[int]
    if not flattened.handle.use_orig_params:
        slot, ranks = WHOLE_FLAT, range(len(everyone))
    elif flattened.is_cut:
        ranks = flattened.owners(slot)
    else:
        ranks = range(1)
    for rank in ranks:
        description = everyone[rank].get(slot)
        if description is None:
            continue
        if merged is None:
            merged = dict(description)
            continue
        for name, value in description.items():
            if name not in merged:
                merged[name] = value
            elif not _same(merged[name], value):
                raise RankMismatchError(
                    f"Rank {rank} has another value for the optimizer state '{name}' of "
                    f"'{flattened.names[max(slot, 0)]}': {value}, and a rank before it has {merged[name]}. Step and "
                    "load every rank's optimizer alike."
                )
    return merged


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        one, other = one.item(), other.item()
    if isinstance(one, _COMPARABLE) and isinstance(other, _COMPARABLE):
        # Not by value: a NaN is the same as itself here.
        return repr(one) == repr(other)
    return type(one) is type(other) and (not isinstance(one, _TensorState) or one == other)


def _whole_state(
    flattened: Flattened, own: Mapping[int, Mapping[str, Any]], name: str, dtype: torch.dtype
) -> torch.Tensor:
    """One kind of state of all parameters in a flat parameter, laid out as that is; zeros where there is none."""
    layout = flattened.layout
    shard = torch.zeros(layout.shard_numel, dtype=dtype, device=_device_of(flattened, own, name))
    flat = own.get(WHOLE_FLAT, {}).get(name)
    if flat is not None:
        shard.copy_(flat)
    else:
        for piece in flattened.unit.pieces:
            value = own.get(piece.slot, {}).get(name)
            if isinstance(value, torch.Tensor) and value.dtype == dtype:
                slot = layout.slots[piece.slot]
                if flattened.is_cut:
                    shard.narrow(0, piece.shard_offset, piece.numel).copy_(value.reshape(-1))
                else:
                    view_of(shard, slot.shape, slot.stride, slot.offset).copy_(value)
    return gather_whole(flattened.unit, shard) if flattened.is_cut else shard


def _device_of(flattened: Flattened, own: Mapping[int, Mapping[str, Any]], name: str) -> torch.device:
    if flattened.is_cut:
        return flattened.device
    values = (entries.get(name) for entries in own.values())
    return next((value.device for value in values if isinstance(value, torch.Tensor)), flattened.device)


def _copied(entries: Mapping[str, Any], form: Form) -> dict[str, Any]:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().clone()
        return tensor.cpu() if form.offload else tensor

    return {name: map_tensors(copied, value) for name, value in entries.items()}


def _named_group(group: Mapping[str, Any], keys: Mapping[Key, nn.Parameter], names: ModelNames) -> dict[str, Any]:
    held = [name for key in group["params"] for name in names.names_of(keys[key])]
    settings = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
    if "param_names" in settings:
        settings["param_names"] = list(held)
    return {**settings, "params": held}


def _warn_about_unknown(key: object) -> None:
    warnings.warn(
        f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to the returned "
        "state_dict. In most cases, this is a user-defined state that is not associated with any particular parameter. "
        "Another possible case is this state is managed by TorchRec. Otherwise, there may  be a mismatched assumption "
        "of optim_state_dict of this mode.",
        stacklevel=6,
    )


# From a state dict of the unwrapped model to one that a sharded model's optimizer loads.


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


# Optimizer state as distributed tensors, each rank's rows of every tensor, and whole again.


def distribute(whole: torch.Tensor, flattened: Flattened, *, offload: bool) -> torch.Tensor:
    """This rank's rows of ``whole``: a ``DTensor`` where the instance has a mesh, else a ``ShardedTensor``.

    Copies, and does not communicate.
    """
    instance = flattened.instance
    return own_rows(whole, instance, instance._device_mesh, offload=offload)


def dtype_of(value: Any) -> torch.dtype:
    """The dtype of a tensor of whatever kind."""
    if _torch_private.is_sharded_tensor(value):
        value = value.metadata().tensor_properties
    found: torch.dtype = value.dtype
    return found


def refuse_other_cut(value: object, flattened: Flattened, name: str) -> None:
    """Refuse a sharded tensor that other ranks hold than those of the instance."""
    if not _torch_private.is_sharded_tensor(value):
        return
    otherwise = cut_otherwise(value, flattened.instance.world_size)
    if otherwise is not None:
        raise StateError(
            f"Optimizer state of '{name}' {otherwise} (rank {flattened.instance.rank}). Load it with the number of "
            "ranks that saved it, or through torch.distributed.checkpoint."
        )


def collect(value: torch.Tensor, flattened: Flattened) -> torch.Tensor:
    """The whole of ``value``, on every rank that has a part of it; a plain tensor is whole already.

    Every rank of the instance's group must call this, in the same order.
    """
    if isinstance(value, DTensor):
        # Offloaded values keep the mesh of the device where they were gathered.
        on_mesh: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
        return on_mesh.full_tensor()
    if not _torch_private.is_sharded_tensor(value):
        return value
    collectives = collectives_of(flattened.instance.process_group, flattened.device)
    return gather_rows([value], collectives, dtype_of(value), flattened.device)[0]


# What an optimizer's keys stand for: parameters of the model under their own names, flat or not.


#: What an optimizer's state dict names a parameter by: a position, or a name in optimizers that are keyed by names.
Key = int | str
#: In the place of a parameter's index: the flat parameter, which stands for all of them.
WHOLE_FLAT = -1


class OptimStateKeyError(ConfigError, KeyError):
    """A parameter that an optimizer, a state dict and a model do not agree on."""

    def __str__(self) -> str:
        # KeyError would show the message quoted, with its line breaks escaped.
        return str(self.args[0])


@dataclass(frozen=True, eq=False, slots=True)
class Flattened:
    """One flat parameter of the model, under the names that the unwrapped model has."""

    instance: FSDPInstance
    handle: FlatParamHandle
    names: tuple[str, ...]
    """Of each parameter inside, the first fully-qualified name."""
    aliases: tuple[tuple[str, ...], ...]
    """Of each parameter inside, every fully-qualified name."""

    @property
    def unit(self) -> FlatUnit:
        """The engine's unit."""
        assert self.instance._flat_unit is not None
        return self.instance._flat_unit

    @property
    def layout(self) -> FlatLayout:
        """Where each parameter lies."""
        return self.handle.layout

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds a part only."""
        return self.unit.grid.shard is not None

    @property
    def device(self) -> torch.device:
        """Where collectives on it run."""
        return self.unit.spec.device

    def owners(self, slot: int) -> list[int]:
        """The ranks whose shard has elements of a parameter; all ranks for a parameter without elements."""
        layout, here = self.layout, self.layout.slots[slot]
        if not here.numel:
            return list(range(layout.world_size))
        return list(range(here.offset // layout.shard_numel, (here.end - 1) // layout.shard_numel + 1))


class ModelNames:
    """The parameters of ``model`` by name: those in flat parameters, and those that FSDP leaves alone."""

    def __init__(self, model: nn.Module) -> None:
        places = {module: name for name, module in model.named_modules()}
        self.flattened: list[Flattened] = []
        #: Of a flat parameter (``WHOLE_FLAT``), or of a parameter that views one, where it belongs.
        self.managed: dict[nn.Parameter, tuple[Flattened, int]] = {}
        #: The names that stand for a parameter: all that a flat parameter holds, or its own.
        self.names: dict[nn.Parameter, tuple[str, ...]] = {}
        #: Every name of a parameter, to the first of them.
        self.first: dict[str, str] = {}
        for instance, module in zip(*_get_fsdp_states_with_modules(model), strict=True):
            if instance._handle is not None:
                self._add_handle(instance, instance._handle, places[module])
        #: The parameters that FSDP does not manage.
        self.plain: dict[str, nn.Parameter] = {}
        for parameter, names in _get_param_to_fqns(model, dedup_shared_params=False).items():
            if parameter not in self.names and names[0] not in self.first:
                self.plain[names[0]] = parameter
                self.names[parameter] = (names[0],)
                self.first.update(dict.fromkeys(names, names[0]))
        #: The name under which the model itself shows a parameter, wrappers' prefixes included.
        self.registered = {parameter: name for name, parameter in model.named_parameters()}

    @property
    def device(self) -> torch.device:
        """Where objects that describe state travel through."""
        return self.flattened[0].instance.compute_device if self.flattened else torch.device("cpu")

    @property
    def rank(self) -> int:
        """This process's rank, for messages."""
        return self.flattened[0].instance.rank if self.flattened else 0

    def _add_handle(self, instance: FSDPInstance, handle: FlatParamHandle, place: str) -> None:
        prefix = f"{place}." if place else ""
        aliases = tuple(
            tuple(dict.fromkeys(clean_tensor_name(f"{prefix}{name}") for name in each.names))
            for each in handle.parameters
        )
        found = Flattened(instance, handle, tuple(names[0] for names in aliases), aliases)
        self.flattened.append(found)
        for names in aliases:
            self.first.update(dict.fromkeys(names, names[0]))
        if handle.use_orig_params:
            for index, each in enumerate(handle.parameters):
                self.managed[each.original] = found, index
                self.names[each.original] = (found.names[index],)
        else:
            self.managed[handle.flat_param] = found, WHOLE_FLAT
            self.names[handle.flat_param] = found.names

    def names_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The names that ``parameter`` stands for.

        Raises:
            OptimStateKeyError: the model does not have it.
        """
        names = self.names.get(parameter)
        if names is None:
            raise OptimStateKeyError(
                f"Can't find a parameter of shape {tuple(parameter.shape)} from {list(self.first)}: the optimizer has "
                f"it, and the model has not (rank {self.rank}). Construct the optimizer after the model was wrapped, "
                "or wrap with use_orig_params=True."
            )
        return names


def keys_of(optim: torch.optim.Optimizer, names: ModelNames, *, named: bool) -> dict[Key, nn.Parameter]:
    """The keys of ``optim``'s state dict: positions, or with ``named`` the names under which the model shows them.

    Raises:
        OptimStateKeyError: the model does not have one of the parameters.
    """
    parameters = [parameter for group in optim.param_groups for parameter in group["params"]]
    for parameter in parameters:
        names.names_of(parameter)
    if not named:
        return dict(enumerate(parameters))
    keys: dict[Key, nn.Parameter] = {}
    for parameter in parameters:
        key = names.registered.get(parameter)
        if key is None:
            raise OptimStateKeyError(
                f"Can't find {names.names_of(parameter)[0]} from {list(names.registered.values())} (rank "
                f"{names.rank}). Leave summon_full_params before the optimizer's state is read."
            )
        keys[key] = parameter
    return keys


def keys_of_input(
    model: nn.Module, optim_input: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
) -> dict[Key, nn.Parameter]:
    """The keys that an optimizer gives to ``optim_input``, what it was constructed with; None: ``model.parameters()``.

    Raises:
        ConfigTypeError: (a ``TypeError``) neither an iterable of tensors nor one of dicts.
        ConfigError: (a ``ValueError``) nothing in it.
        ConfigAssertionError: (an ``AssertionError``) a group without parameters.
    """
    if optim_input is None:
        return dict(enumerate(model.parameters()))
    try:
        given: list[Any] = list(optim_input)
    except TypeError as error:
        raise ConfigTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}. Pass what the "
            "optimizer was constructed with, or leave it out and pass optim."
        ) from error
    if not given:
        raise ConfigError(
            "Optimizer input should not be empty. Pass what the optimizer was constructed with, or leave it out and "
            "pass optim."
        )
    if all(isinstance(each, torch.Tensor) for each in given):
        return dict(enumerate(given))
    if not all(isinstance(each, dict) for each in given):
        raise ConfigTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, and of one of the two: got "
            f"{sorted({type(each).__name__ for each in given})}."
        )
    for index, each in enumerate(given):
        if "params" not in each:
            raise ConfigAssertionError(
                'A parameter group should map "params" to a list of the parameters in the group, and group '
                f"{index} has {list(each)}."
            )
    return dict(enumerate(parameter for each in given for parameter in each["params"]))


def is_keyed_by_name(optim_state_dict: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer is keyed by names: none that torch has, but some of other packages."""
    key = next(iter(optim_state_dict.get("state", ())), None)
    return isinstance(key, str)


def ordered_groups(
    saved: Sequence[Mapping[str, Any]], keys: Sequence[Sequence[Key]], optim: torch.optim.Optimizer | None
) -> list[tuple[Mapping[str, Any], Sequence[Key]]]:
    """Saved parameter groups with the keys in each, in the order in which ``optim`` has groups of the same parameters.

    ``load_state_dict`` matches groups, and parameters inside them, by position alone.
    """
    pairs = list(zip(saved, keys, strict=True))
    if optim is None:
        return pairs
    start, wanted = 0, []
    for group in optim.param_groups:
        stop = start + len(group["params"])
        wanted.append(frozenset[Hashable](range(start, stop)))
        start = stop
    found = {frozenset[Hashable](each): (group, each) for group, each in pairs}
    if len(found) != len(pairs) or set(found) != set(wanted):
        return pairs
    return [found[each] for each in wanted]


# The older functions for optimizer state dicts, which take their settings as arguments.


#: What an optimizer is constructed with.
OptimInput = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None


@torch.no_grad()
def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_input: OptimInput, rank0_only: bool, group: Any
) -> dict[str, Any]:
    """The whole state by parameter names, in host memory; on other ranks than 0 nothing, with ``rank0_only``."""
    _warn_replaced("full_optim_state_dict", "optim_state_dict")
    _warn_about_input(optim_input)
    given = optim.state_dict()
    names = ModelNames(model)
    keys = _keys(model, names, optim, optim_input, named=is_keyed_by_name(given))
    return gather_optim_state(names, given, keys, group, Form(distributed=False, offload=True, rank0_only=rank0_only))


@torch.no_grad()
def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any) -> dict[str, Any]:
    """The state by parameter names as distributed tensors, in host memory."""
    _warn_replaced("sharded_optim_state_dict", "optim_state_dict")
    given = optim.state_dict()
    names = ModelNames(model)
    keys = _keys(model, names, optim, None, named=is_keyed_by_name(given))
    return gather_optim_state(names, given, keys, group, Form(distributed=True, offload=True, rank0_only=False))


@torch.no_grad()
def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """This rank's part of what ``full_optim_state_dict`` returned. Does not communicate."""
    _warn_replaced("shard_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_about_input(optim_input)
    return _shard(full_optim_state_dict, model, optim_input, optim)


@torch.no_grad()
def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """This rank's part of what ``sharded_optim_state_dict`` returned."""
    _warn_replaced("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _shard(sharded_optim_state_dict, model, None, optim)


@torch.no_grad()
def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
    group: Any,
) -> dict[str, Any]:
    """The same as ``shard_full_optim_state_dict``, where rank 0 alone has the whole state."""
    _warn_replaced("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_about_input(optim_input)
    return _shard(full_optim_state_dict, model, optim_input, optim, rank0_only=True, group=group)


@torch.no_grad()
def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    to_names: bool,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """``optim_state_dict`` keyed by parameter names, or by positions in the optimizer of ``model``.

    Args:
        optim_state_dict: By either; returned as it is where its keys are right already.
        to_names: By names; else by positions.
        model: Whose parameters the keys stand for. Usually one that is not sharded.
        optim_input: What its optimizer was constructed with; deprecated.
        optim: Its optimizer. Without both, one of ``model.parameters()``.

    Raises:
        ConfigError: (a ``ValueError``) some keys are names and others positions.
        OptimStateKeyError: (a ``KeyError``) a key that stands for no parameter of the optimizer.
    """
    _warn_about_input(optim_input)
    state = optim_state_dict["state"]
    kinds = {type(key) for key in state}
    if len(kinds) > 1 and kinds & {str, int}:
        raise ConfigError(
            f"Invalid parameter keys: {list(state)}. They must all be parameter names, or all be positions."
        )
    if not kinds - {str if to_names else int}:
        return optim_state_dict
    if optim_input is None and optim is not None:
        parameters: dict[Key, nn.Parameter] = dict(
            enumerate(parameter for group in optim.param_groups for parameter in group["params"])
        )
    else:
        parameters = keys_of_input(model, optim_input)
    names = {parameter: found[0] for parameter, found in _get_param_to_fqns(model).items()}
    wanted: dict[Key, Key] = {}
    for position, parameter in parameters.items():
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
        settings = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        # An optimizer matches parameters by their order alone.
        groups.append({**settings, "params": keys if to_names else sorted(keys)})
    return {"state": {renamed(key): value for key, value in state.items()}, "param_groups": groups}


def _shard(
    optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput,
    optim: torch.optim.Optimizer | None,
    *,
    rank0_only: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    names = ModelNames(model)
    keys = _keys(model, names, optim, optim_input, named=False)
    return shard_optim_state(
        names,
        optim_state_dict,
        keys,
        home_of(group, names) if rank0_only else None,
        rank0_only=rank0_only,
        optim=optim if optim_input is None else None,
        named=False,
    )


def _keys(
    model: nn.Module,
    names: ModelNames,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput,
    *,
    named: bool,
) -> dict[Key, nn.Parameter]:
    if optim is not None and optim_input is None:
        return keys_of(optim, names, named=named)
    keys = keys_of_input(model, optim_input)
    for parameter in keys.values():
        names.names_of(parameter)
    return keys


def refuse_key_type(key_type: object) -> ConfigAssertionError:
    """The error for what is no ``OptimStateKeyType``."""
    return ConfigAssertionError(f"Expected optim_state_key_type to be PARAM_NAME or PARAM_ID, got {key_type}.")


def _warn_about_input(optim_input: OptimInput) -> None:
    if optim_input is not None:
        _warn(
            "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may remove it from "
            "your code without changing its functionality."
        )


def _warn_replaced(current: str, replacement: str) -> None:
    _warn(
        f"``FullyShardedDataParallel.{current}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{replacement}``. ``FullyShardedDataParallel.{current}`` may be removed after "
        "PyTorch 2.2."
    )


def _warn(text: str) -> None:
    # Above this: its caller, the function, torch.no_grad, the static method; then the user's line.
    warnings.warn(text, FutureWarning, stacklevel=6)
