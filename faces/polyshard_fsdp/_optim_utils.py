"""Optimizer state dicts: from a sharded model's optimizer to the names and shapes of the unwrapped model, and back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from polyshard.errors import (
    ConfigAssertionError,
    ConfigError,
    ConfigTypeError,
    RankMismatchError,
    StateError,
    warn_once,
)
from polyshard.extension import FlatLayout, Slot, gather_whole, map_tensors, view_of
from polyshard.interfaces import Collectives
from torch import nn
from torch.distributed.tensor import DTensor

from . import _state_dict_utils, _torch_private
from ._collectives import collectives_of
from ._common_utils import _get_param_to_fqns, clean_tensor_name
from ._flat_param import FlatParamHandle
from ._shard_utils import PartPlacement, gather_rows, own_rows, refuse_other_cut, shape_of
from ._state import FSDPInstance
from ._traversal_utils import _get_fsdp_states_with_modules
from ._unit import FlatUnit
from .api import StateDictSettings, StateDictType

#: The keys of an optimizer's state dict: positions, or names in optimizers that are keyed by names.
Key = int | str
#: The first argument of an optimizer's constructor.
OptimInput = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
#: In the place of a parameter's index: the flat parameter, which stands for all of them.
WHOLE_FLAT = -1
_COMPARABLE = (bool, int, float, str, type(None))
_ADVICE = "Load it into a model with use_orig_params=True, where each parameter keeps state of its own."


class OptimStateKeyError(ConfigError, KeyError):
    """A parameter that an optimizer, a state dict and a model do not agree on."""

    def __str__(self) -> str:
        # KeyError would show the message quoted, with its line breaks escaped.
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a gathered state dict."""

    distributed: bool
    """Tensors are cut along their first dimension, one chunk a rank; else whole."""
    offload: bool
    """Tensors are in host memory."""
    rank0_only: bool
    """Ranks other than the group's first get an empty dict."""


def settings_of(model: nn.Module) -> StateDictSettings:
    """The state dict settings of the instances in ``model``.

    Raises:
        StateError: (a ``RuntimeError``) ``LOCAL_STATE_DICT`` with a device mesh.
    """
    settings = _state_dict_utils._get_state_dict_type(model)
    for instance in _get_fsdp_states_with_modules(model)[0]:
        if instance._device_mesh is not None and settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise StateError(
                "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with LOCAL_STATE_DICT. Please "
                f"set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict (rank {instance.rank})."
            )
    return settings


# Which parameters an optimizer's keys stand for.


@dataclass(frozen=True, eq=False, slots=True)
class Flattened:
    """One flat parameter of the model, under the names that the unwrapped model has."""

    instance: FSDPInstance
    handle: FlatParamHandle
    unit: FlatUnit
    names: tuple[str, ...]
    """The first fully-qualified name of each parameter inside."""
    parameters: Mapping[int, nn.Parameter]
    """By index, what an optimizer may have: the flat parameter alone, as ``WHOLE_FLAT``, or the others."""

    @property
    def layout(self) -> FlatLayout:
        """Where each parameter lies."""
        return self.handle.layout

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds a part only."""
        return self.unit.ranks.owner is not None

    @property
    def device(self) -> torch.device:
        """Where collectives on it run."""
        return self.unit.spec.device

    def owners(self, index: int) -> range:
        """The ranks whose shard has elements of a parameter; all ranks for a parameter without elements."""
        layout = self.layout
        if index == WHOLE_FLAT or not layout.slots[index].numel:
            return range(layout.world_size)
        slot = layout.slots[index]
        return range(slot.offset // layout.shard_numel, (slot.end - 1) // layout.shard_numel + 1)


class ModelNames:
    """The parameters of ``model`` by name: those in flat parameters, and those that FSDP leaves alone."""

    def __init__(self, model: nn.Module) -> None:
        places = {module: name for name, module in model.named_modules()}
        self.flattened: list[Flattened] = []
        #: The place of a flat parameter, or of a parameter that views one.
        self.managed: dict[nn.Parameter, tuple[Flattened, int]] = {}
        #: The names that stand for a parameter: those of all that a flat parameter holds, or its own.
        self.names: dict[nn.Parameter, tuple[str, ...]] = {}
        #: Every name of a parameter, to the first of them.
        self.first: dict[str, str] = {}
        for instance, module in zip(*_get_fsdp_states_with_modules(model), strict=True):
            if instance._handle is not None:
                self._add(instance, instance._handle, f"{places[module]}." if places[module] else "")
        #: The parameters that FSDP does not manage.
        self.plain: dict[str, nn.Parameter] = {}
        for parameter, names in _get_param_to_fqns(model, dedup_shared_params=False).items():
            if parameter not in self.names and names[0] not in self.first:
                self.plain[names[0]] = parameter
                self.names[parameter] = (names[0],)
                self.first.update(dict.fromkeys(names, names[0]))
        #: The name under which the model itself shows a parameter, wrappers' prefixes included.
        self.registered = {parameter: name for name, parameter in model.named_parameters()}
        #: Objects that describe state travel through this device.
        self.device = self.flattened[0].instance.compute_device if self.flattened else torch.device("cpu")
        #: This process's rank, for messages.
        self.rank = self.flattened[0].instance.rank if self.flattened else 0

    def _add(self, instance: FSDPInstance, handle: FlatParamHandle, prefix: str) -> None:
        aliases = [[clean_tensor_name(prefix + name) for name in each.names] for each in handle.parameters]
        parameters: dict[int, nn.Parameter] = {WHOLE_FLAT: handle.flat_param}
        if handle.use_orig_params:
            parameters = {index: each.original for index, each in enumerate(handle.parameters)}
        found = Flattened(instance, handle, handle.unit, tuple(names[0] for names in aliases), parameters)
        self.flattened.append(found)
        for names in aliases:
            self.first.update(dict.fromkeys(names, names[0]))
        for index, parameter in parameters.items():
            self.managed[parameter] = found, index
            self.names[parameter] = found.names if index == WHOLE_FLAT else (found.names[index],)

    def names_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The names that ``parameter`` stands for. Raises ``OptimStateKeyError`` where the model does not have it."""
        names = self.names.get(parameter)
        if names is None:
            raise OptimStateKeyError(
                f"Can't find a parameter of shape {tuple(parameter.shape)} from {list(self.first)}: the optimizer has "
                f"it, and the model has not (rank {self.rank}). Construct the optimizer after the model was wrapped, "
                "or wrap with use_orig_params=True."
            )
        return names

    def keys_of(
        self, model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput, *, named: bool
    ) -> dict[Key, nn.Parameter]:
        """The keys of an optimizer's state dict: positions, or with ``named`` the names that the model shows.

        Raises:
            OptimStateKeyError: the model does not have one of the parameters.
        """
        keys = positions_of(model, optim, optim_input)
        for parameter in keys.values():
            self.names_of(parameter)
        if not named or optim_input is not None:
            return keys
        by_name: dict[Key, nn.Parameter] = {}
        for parameter in keys.values():
            key = self.registered.get(parameter)
            if key is None:
                raise OptimStateKeyError(
                    f"Can't find {self.names_of(parameter)[0]} from {list(self.registered.values())} (rank "
                    f"{self.rank}). Leave summon_full_params before the optimizer's state is read."
                )
            by_name[key] = parameter
        return by_name


def positions_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput
) -> dict[Key, nn.Parameter]:
    """The parameters of an optimizer by position: of ``optim``, of one that was constructed with ``optim_input``, or of
    one of ``model.parameters()``.

    Raises:
        ConfigTypeError: (a ``TypeError``) ``optim_input`` is neither an iterable of tensors nor one of dicts.
        ConfigError: (a ``ValueError``) nothing is in it.
        ConfigAssertionError: (an ``AssertionError``) it has a group without parameters.
    """
    if optim_input is None:
        if optim is None:
            return dict(enumerate(model.parameters()))
        return dict(enumerate(parameter for group in optim.param_groups for parameter in group["params"]))
    given: list[Any] = list(optim_input) if isinstance(optim_input, Iterable) else [None]
    if not given:
        raise ConfigError(
            "Optimizer input should not be empty. Pass what the optimizer was constructed with, or leave it out and "
            "pass optim."
        )
    if all(isinstance(each, torch.Tensor) for each in given):
        return dict(enumerate(given))
    if not all(isinstance(each, dict) for each in given):
        raise ConfigTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}. Pass what the "
            "optimizer was constructed with, or leave it out and pass optim."
        )
    for index, each in enumerate(given):
        if "params" not in each:
            raise ConfigAssertionError(
                'A parameter group should map "params" to a list of the parameters in the group, and group '
                f"{index} has {list(each)}."
            )
    return dict(enumerate(parameter for each in given for parameter in each["params"]))


def home_of(group: Any, names: ModelNames) -> Collectives | None:
    """The ranks that save or load together; None for this one alone."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None and names.flattened:
        group = names.flattened[0].instance.process_group
    return None if group is None or group.size() == 1 else collectives_of(group, names.device)


# From the optimizer of a sharded model to a state dict of the unwrapped model.


class _TensorState(NamedTuple):
    """In a description of state, a tensor of the parameter's shape."""

    dtype: torch.dtype


#: The state of one parameter without its tensors, which are too large to be sent along.
_Description = dict[str, Any]


@torch.no_grad()
def gather(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any] | None,
    group: Any,
    form: Form,
    optim_input: OptimInput = None,
) -> dict[str, Any]:
    """The state of ``optim`` under the names, and in the shapes, of the unwrapped model.

    Args:
        model: An FSDP instance, or a module with some inside. All ranks call this together.
        optim: An optimizer of its parameters.
        optim_state_dict: Converted instead of ``optim.state_dict()``.
        group: The ranks that call this; None for the default group.
        form: Of the result. Distributed tensors are ``ShardedTensor``, or ``DTensor`` where the instances have a mesh;
            where nothing is cut, they are whole tensors too.
        optim_input: What ``optim`` was constructed with, in the place of its groups.

    Raises:
        OptimStateKeyError: the model does not have a parameter of the optimizer.
        ConfigError: (a ``ValueError``) on every rank, where state on one has not the shape of its parameter.
        RankMismatchError: (a ``RuntimeError``) on every rank, where state is missing on some, or differs.
    """
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    state = given["state"]
    names = ModelNames(model)
    keys = names.keys_of(model, optim, optim_input, named=isinstance(next(iter(state), None), str))
    home = home_of(group, names)
    own = {parameter: state[key] for key, parameter in keys.items() if key in state}
    order, wanted = _agree(home, names, keys, own)
    saves = form.distributed or not form.rank0_only or home is None or home.rank == 0
    gathered: dict[str, dict[str, Any]] = {}
    for flattened, mine, everyone in _exchange(names, own):
        if wanted is None or flattened.names in wanted:
            gathered.update(_gather_flat(flattened, mine, everyone, form, saves=saves))
    if not saves:
        return {}
    plain = {names.names_of(each)[0]: entries for each, entries in own.items() if each not in names.managed}
    ordered: dict[str, Any] = {}
    for name in (name for each in order for name in each):
        if name in gathered:
            ordered[name] = gathered[name]
        elif name in plain and (wanted is None or (name,) in wanted):
            ordered[name] = {key: map_tensors(_copier(form), value) for key, value in plain[name].items()}
    for name, entries in gathered.items():
        ordered.setdefault(name, entries)
    for key, value in state.items():
        if key not in keys:
            warn_once(
                f"Found a optim state, {key}, that FSDP cannot process. FSDP will directly copy everything to the "
                "returned state_dict. In most cases, this is a user-defined state that is not associated with any "
                "particular parameter.",
            )
            ordered[key] = value
    result: dict[str, Any] = {"state": ordered}
    if "param_groups" in given:
        result["param_groups"] = [_named_group(group, keys, names) for group in given["param_groups"]]
    return result


def _agree(
    home: Collectives | None,
    names: ModelNames,
    keys: Mapping[Key, nn.Parameter],
    own: Mapping[nn.Parameter, Mapping[str, Any]],
) -> tuple[list[tuple[str, ...]], set[tuple[str, ...]] | None]:
    """Refuse, on all ranks alike, state that cannot be gathered.

    Returns the parameters in the order of the first rank's optimizer, then those that others alone have: who sends
    each entry of a distributed state dict around must meet them in one order, and optimizers may differ in theirs. And
    the parameters whose state is wanted, None for all that any rank has: flat parameters have state on every rank, the
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
    lines = ""
    for rank, theirs in enumerate(everyone):
        missing = [each for each in wanted if each not in theirs]
        if missing:
            lines += f"\nRank {rank} is missing states for the parameters: {missing}"
    if lines:
        raise RankMismatchError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer but "
            f"some ranks are missing some of those states{lines}\nStep every rank's optimizer alike before saving."
        )
    return order, set(wanted)


def _misshapen(names: ModelNames, parameter: nn.Parameter, entries: Mapping[str, Any]) -> str | None:
    if parameter not in names.managed:
        return None
    flattened, index = names.managed[parameter]
    shape = torch.Size([flattened.layout.shard_numel]) if index == WHOLE_FLAT else parameter.shape
    for value in entries.values():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() != shape.numel():
            return f"{value.shape} {shape}"
    return None


def _exchange(
    names: ModelNames, own: Mapping[nn.Parameter, Mapping[str, Any]]
) -> list[tuple[Flattened, dict[int, Mapping[str, Any]], list[Mapping[int, _Description]]]]:
    """Each flat parameter with this rank's state of it by index, and the descriptions of all ranks of its group."""
    held = {
        flattened: {index: own[each] for index, each in flattened.parameters.items() if each in own}
        for flattened in names.flattened
    }
    groups: dict[Any, list[Flattened]] = {}
    for flattened in names.flattened:
        groups.setdefault(flattened.instance.process_group if flattened.is_cut else None, []).append(flattened)
    everyones: dict[Flattened, list[Mapping[int, _Description]]] = {}
    for members in groups.values():
        mine = [{index: _describe(entries) for index, entries in held[each].items()} for each in members]
        shard = members[0].unit.ranks.owner
        everyone = shard.all_gather_object(mine) if shard is not None else [mine]
        everyones.update((each, [theirs[index] for theirs in everyone]) for index, each in enumerate(members))
    return [(flattened, held[flattened], everyones[flattened]) for flattened in names.flattened]


def _describe(entries: Mapping[str, Any]) -> _Description:
    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return _TensorState(value.dtype) if value.dim() else value.detach().clone().cpu()

    return {name: described(value) for name, value in entries.items()}


def _gather_flat(
    flattened: Flattened,
    own: Mapping[int, Mapping[str, Any]],
    everyone: Sequence[Mapping[int, _Description]],
    form: Form,
    *,
    saves: bool,
) -> dict[str, dict[str, Any]]:
    """The whole state of each parameter in one flat parameter, by name; a parameter without state is left out."""
    results: dict[int, _Description] = {}
    for index in range(len(flattened.layout.slots)):
        description = _merge(flattened, index if flattened.handle.use_orig_params else WHOLE_FLAT, everyone)
        if description is not None:
            # A plain optimizer that loads this counts in the very tensors: no two parameters may share one.
            results[index] = copy.deepcopy(description)
    wanted = sorted(
        {
            (name, str(value.dtype), value.dtype)
            for description in results.values()
            for name, value in description.items()
            if isinstance(value, _TensorState)
        }
    )
    copied = _copier(form)
    for name, _, dtype in wanted:
        whole = _whole_state(flattened, own, name, dtype)
        for index, result in results.items():
            value, part = result.get(name), flattened.handle.parameters[index].part
            if isinstance(value, _TensorState) and value.dtype == dtype and (saves or part is not None):
                view = _view(whole, flattened.layout.slots[index])
                instance = flattened.instance
                if part is not None and form.distributed and flattened.is_cut:
                    placement = PartPlacement.of(part, instance, flattened.names[index])
                    result[name] = placement.own_rows(view, offload=form.offload)
                elif part is not None:
                    # Ranks that save nothing have parts of what others save.
                    result[name] = copied(cast("DTensor", part.as_leaf(view)).full_tensor())
                elif form.distributed and flattened.is_cut:
                    result[name] = own_rows(view, instance, instance._device_mesh, offload=form.offload)
                else:
                    # Cloned first: each would keep the memory of all, and be saved with it.
                    result[name] = copied(view)
    return {flattened.names[index]: result for index, result in results.items()} if saves else {}


def _view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    return view_of(flat, slot.shape, slot.stride, slot.offset)


def _copier(form: Form) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.detach().clone().cpu() if form.offload else tensor.detach().clone()


def _merge(flattened: Flattened, index: int, everyone: Sequence[Mapping[int, _Description]]) -> _Description | None:
    """The state of a parameter, from the ranks that have elements of it: others' scalars may be stale."""
    merged: _Description | None = None
    ranks = flattened.owners(index) if flattened.is_cut else range(1)
    for rank in ranks:
        description = everyone[rank].get(index)
        if description is None:
            continue
        merged = dict(description) if merged is None else merged
        for name, value in description.items():
            if not _same(merged.setdefault(name, value), value):
                raise RankMismatchError(
                    f"Rank {rank} has another value for the optimizer state '{name}' of "
                    f"'{flattened.names[max(index, 0)]}': {value}, and a rank before it has {merged[name]}. Step and "
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
    layout, device = flattened.layout, flattened.device
    if not flattened.is_cut:
        values = (entries.get(name) for entries in own.values())
        device = next((value.device for value in values if isinstance(value, torch.Tensor)), device)
    shard = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
    flat = own.get(WHOLE_FLAT, {}).get(name)
    if flat is not None:
        shard.copy_(flat)
    for piece in flattened.unit.pieces:
        value = own.get(piece.slot, {}).get(name)
        if isinstance(value, torch.Tensor) and value.dtype == dtype:
            if flattened.is_cut:
                shard.narrow(0, piece.shard_offset, piece.numel).copy_(value.reshape(-1))
            else:
                _view(shard, layout.slots[piece.slot]).copy_(value)
    return gather_whole(flattened.unit, shard) if flattened.is_cut else shard


def _named_group(group: Mapping[str, Any], keys: Mapping[Key, nn.Parameter], names: ModelNames) -> dict[str, Any]:
    held = [name for key in group["params"] for name in names.names_of(keys[key])]
    settings = _settings_in(group)
    if "param_names" in settings:
        settings["param_names"] = list(held)
    return {**settings, "params": held}


def _settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


# From a state dict of the unwrapped model to one that a sharded model's optimizer loads.


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
            return self._receive(value, flattened.device)
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
    collectives = collectives_of(flattened.instance.process_group, flattened.device)
    return gather_rows([value], collectives, _dtype_of(value), flattened.device)[0]


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
        wanted: list[frozenset[Key]] = []
        start = 0
        for own in optim.param_groups:
            wanted.append(frozenset(range(start, start + len(own["params"]))))
            start += len(own["params"])
        by_keys = {frozenset(keys): (group, keys) for group, keys in keyed}
        if len(by_keys) == len(keyed) and set(by_keys) == set(wanted):
            keyed = [by_keys[each] for each in wanted]
    groups = []
    for index, (group, keys) in enumerate(keyed):
        settings = _settings_in(group)
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
        part = flattened.handle.parameters[index].part
        shape = torch.Size(flattened.layout.slots[index].shape if part is None else part.shape)
        for value in entries.get(name, {}).values():
            if _is_tensor(value) and shape_of(value) != shape:
                raise ConfigError(
                    f"Tensor optimizer state does not have same shape as its parameter: {shape_of(value)} {shape} "
                    f"for '{name}' on rank {rank}. Load the state of the same model."
                )
            refuse_other_cut(value, flattened.instance.world_size, f"Optimizer state of '{name}'", rank)
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
    """Refuse state of one flat parameter's parameters that cannot be that of one tensor."""
    where = f"{list(flattened.names)} on rank {flattened.instance.rank}. {_ADVICE}"
    present = [value for value in values if value is not None]
    kinds = sorted(set(map(_kind, present)))
    if len(kinds) > 1:
        raise ConfigError(
            f"Differing optimizer state types for state {state_name} of the parameters of one flat parameter: {kinds} "
            f"of {where}"
        )
    if present and _is_tensor(present[0]):
        dtypes = set(map(_dtype_of, present))
        if len(dtypes) > 1:
            raise ConfigError(
                "All unflattened parameters comprising a single flat parameter must have positive-dimension tensor "
                f"state with the same dtype but got dtypes {dtypes} for state {state_name} of {where}"
            )
    elif present:
        scalars = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        if len(values) < len(flattened.names) or len(set(map(repr, scalars))) > 1:
            raise ConfigError(
                "All unflattened parameters comprising a single flat parameter must have scalar state with the same "
                f"value and dtype but got values {scalars} for state {state_name} of {where}"
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
                flat = _in_storage_order(value, flattened, index)
                shard.narrow(0, piece.shard_offset, piece.numel).copy_(flat[piece.start : piece.stop])
    return {name: state[name] for name in given}


def _original_state(flattened: Flattened, index: int, given: Mapping[str, Any], source: _Source) -> dict[str, Any]:
    """The state of this rank's elements of a parameter; nothing where it has none."""
    piece = next((piece for piece in flattened.unit.pieces if piece.slot == index), None)
    slot = flattened.layout.slots[index]
    state: dict[str, Any] = {}
    for name in sorted(given):
        value = source.whole(given[name], flattened)
        if _is_tensor(value):
            flat = _in_storage_order(value, flattened, index)
            if flattened.is_cut:
                # A copy, or the whole would live as long as the optimizer.
                value = flat[piece.start : piece.stop].clone() if piece is not None else None
            else:
                value = view_of(flat, slot.shape, slot.stride, 0)
        elif isinstance(value, torch.Tensor):
            value = value.detach().clone()
        state[name] = value
    return {name: state[name] for name in given} if piece is not None or not slot.numel else {}


def _in_storage_order(value: torch.Tensor, flattened: Flattened, index: int) -> torch.Tensor:
    slot, part = flattened.layout.slots[index], flattened.handle.parameters[index].part
    value = value if part is None else part.cut(value)
    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
    return dense.as_strided((slot.numel,), (1,))


# Between the names and the positions of an optimizer that is not sharded.


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
        groups.append({**_settings_in(group), "params": keys if to_names else sorted(keys)})
    return {"state": {renamed(key): value for key, value in state.items()}, "param_groups": groups}
