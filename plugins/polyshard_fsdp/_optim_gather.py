"""From the optimizer of a sharded model to a state dict of the unwrapped model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, RankMismatchError
from polyshard.functions.whole import gather_whole
from polyshard.interfaces import Collectives
from polyshard.nested import map_tensors
from polyshard.runtime.gather import view_of
from torch import nn

from ._collectives import collectives_of
from ._optim_names import WHOLE_FLAT, Flattened, Key, ModelNames
from ._optim_values import distribute

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
