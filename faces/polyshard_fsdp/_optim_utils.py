"""Optimizer state dicts: from a sharded model's optimizer to the names and shapes of the unwrapped model."""

from __future__ import annotations

import copy
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
    UnsupportedError,
)
from polyshard.extension import Slot, gather_whole, map_tensors, view_of
from polyshard.interfaces import Collectives
from torch import nn
from torch.distributed.tensor import DTensor

from . import _state_dict_utils, _torch_private
from ._collectives import collectives_of
from ._common_utils import _get_param_to_fqns, clean_tensor_name, warn
from ._flat_param import FlatParamHandle
from ._shard_utils import PartPlacement, own_rows
from ._state import FSDPInstance
from ._traversal_utils import _get_fsdp_states
from ._unit import FlatUnit
from .api import StateDictSettings

#: The keys of an optimizer's state dict: positions, or names in optimizers that are keyed by names.
Key = int | str
#: The first argument of an optimizer's constructor.
OptimInput = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
#: In the place of a parameter's index: the flat parameter, which stands for all of them.
WHOLE_FLAT = -1
_COMPARABLE = (bool, int, float, str, type(None))


class OptimStateKeyError(ConfigError, KeyError):
    """A parameter that an optimizer, a state dict and a model do not agree on."""

    def __str__(self) -> str:
        # KeyError would show the message quoted, with its line breaks escaped.
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Form:
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
    for instance in _get_fsdp_states(model):
        _state_dict_utils.refuse_local(instance, settings.state_dict_type)
    return settings


# Which parameters an optimizer's keys stand for.


@dataclass(frozen=True, eq=False, slots=True)
class Flattened:
    """One flat parameter of the model, under the names that the unwrapped model has."""

    instance: FSDPInstance
    unit: FlatUnit
    names: tuple[str, ...]
    """The first fully-qualified name of each parameter inside."""
    parameters: Mapping[int, nn.Parameter]
    """By index, what an optimizer may have: the flat parameter alone, as ``WHOLE_FLAT``, or the others."""

    @property
    def is_cut(self) -> bool:
        return self.unit.ranks.owner is not None

    def owners(self, index: int) -> range:
        """The ranks whose shard has elements of a parameter; all ranks for a parameter without elements."""
        layout = self.unit.layout
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
        for instance in _get_fsdp_states(model):
            if instance._handle is not None:
                self._add(instance, instance._handle, f"{places[instance]}." if places[instance] else "")
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
        found = Flattened(instance, handle.unit, tuple(names[0] for names in aliases), parameters)
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
    ordered.update(gathered)
    for key, value in state.items():
        if key not in keys:
            warn(
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
    if any(flattened.unit.handle.use_orig_params for flattened in names.flattened):
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
    shape = torch.Size([flattened.unit.layout.shard_numel]) if index == WHOLE_FLAT else parameter.shape
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
    for index in range(len(flattened.unit.layout.slots)):
        description = _merge(flattened, index if flattened.unit.handle.use_orig_params else WHOLE_FLAT, everyone)
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
            value, part = result.get(name), flattened.unit.handle.parameters[index].part
            if isinstance(value, _TensorState) and value.dtype == dtype and (saves or part is not None):
                view = _view(whole, flattened.unit.layout.slots[index])
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
    layout, device = flattened.unit.layout, flattened.unit.spec.device
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
    settings = settings_in(group)
    if "param_names" in settings:
        settings["param_names"] = list(held)
    return {**settings, "params": held}


def settings_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a parameter group but its parameters, as a copy."""
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})


def refuse_checkpoint_call(instance: FSDPInstance) -> None:
    """Refuse the running function of ``torch.distributed.checkpoint.state_dict`` where it would be wrong.

    Such functions know torch's own wrappers, and take any other module for one that is not sharded. Model state dicts
    are right all the same. An optimizer's is not: each rank would return its own piece under the whole's name.

    Raises:
        UnsupportedError: the function would give or take an optimizer's pieces for the whole, or load whole values into
            shards.
    """
    call = _torch_private.checkpoint_call()
    if call is None:
        return
    (function, arguments), unit = call, instance._flat_unit
    where = f"({type(instance._module_state.inner).__name__} on rank {instance.rank})"
    options = arguments.get("options")
    whole = [each for each in ("full_state_dict", "broadcast_from_rank0") if getattr(options, each, False)]
    if function.startswith("set_") and whole:
        raise UnsupportedError(
            f"torch.distributed.checkpoint.state_dict.{function} with {whole[0]}=True does not know polyshard_fsdp "
            f"{where}, and would load shards where it needs whole parameters. Leave the option out, or call "
            "model.load_state_dict inside FSDP.state_dict_type."
        )
    optimizers = arguments.get("optimizers") or ()
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = (optimizers,)
    if unit is None:
        return
    given = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
    if not given.isdisjoint(unit.originals.tensors):
        raise UnsupportedError(
            f"torch.distributed.checkpoint.state_dict.{function} does not know polyshard_fsdp {where}, and would "
            "take each rank's piece of the optimizer's state for the whole. Call polyshard_fsdp's "
            "FullyShardedDataParallel.optim_state_dict(model, optimizer) and optim_state_dict_to_load instead, "
            "inside its state_dict_type: what they give and take can be saved and loaded by "
            "torch.distributed.checkpoint. For the model alone, get_model_state_dict and set_model_state_dict work."
        )
