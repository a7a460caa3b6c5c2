"""State of a sharded model and its optimizers as Lightning saves it without shards: whole tensors, in one file.

Elements are sent by the rank that has them, some megabytes at a time, and only rank 0 keeps what it receives, in host
memory. Names, shapes and order are those of the unsharded model, so that each loads what the other saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint import model_state, optimizer_state
from ..engine.surface.state_dicts import state_dicts_of_pieces
from ..errors import ConfigError, UnsupportedError
from ..state.sharded import CheckpointTensor
from ._sharding import names_of_parameters

#: Bytes that are sent at once.
_BATCH_NBYTES = 64 * 2**20
_Key = tuple[str, ...]


class _Described(NamedTuple):
    """A value on one rank, without the elements that are sent."""

    value: Any
    """What is no tensor, and tensors of one element."""
    shape: tuple[int, ...] | None = None
    """Of the whole tensor; None for a ``value``."""
    dtype: torch.dtype | None = None
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    """Offsets and sizes of what the rank has of it."""


class _Sent(NamedTuple):
    """A box of a tensor, and who sends it."""

    key: _Key
    source: int
    box: int
    nbytes: int


def whole_model_state(module: nn.Module, device: torch.device) -> dict[str, Any]:
    """``module.state_dict()`` of the unsharded model, in host memory, on rank 0; empty on others. Every rank calls it.

    Raises:
        UnsupportedError: the state dict does not have the parameters under their names, or ranks are pretended.
    """
    with state_dicts_of_pieces():
        shown = module.state_dict()
    state = model_state(module)
    cut = {name: value for name, value in state.items() if isinstance(value, CheckpointTensor)}
    # What has several names is in the state under the first.
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    missing = next((name for name, of in names.items() if of in cut and name not in shown), None)
    if missing is not None:
        raise UnsupportedError(
            f"state_dict() of {type(module).__name__} has no '{missing}': a hook changed its names, so that its "
            f"parameters cannot be told (rank {dist.get_rank()}). Save with state_dict_type='sharded'."
        )
    whole = _gathered({(name,): value for name, value in cut.items()}, device)
    if dist.get_rank() != 0:
        return {}
    return {name: whole[(names[name],)] if names.get(name) in cut else _on_host(value) for name, value in shown.items()}


def whole_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Any]:
    """``optimizer.state_dict()`` of the unsharded model, in host memory, on rank 0; empty on others.

    Every rank calls it. A flat parameter appears as the parameters that it stands for, in the model's order.
    """
    told = optimizer_state(module, optimizer)
    values: dict[_Key, Any] = {(name, key): value for name, own in told["state"].items() for key, value in own.items()}
    whole = _gathered(values, device)
    if dist.get_rank() != 0:
        return {}
    state: dict[int, dict[str, Any]] = {}
    groups, number = [], 0
    for group, names in zip(told["param_groups"], _names_by_group(module, optimizer), strict=True):
        for index, name in enumerate(names, start=number):
            own = {key[1]: value for key, value in whole.items() if key[0] == name}
            if own:
                state[index] = own
        settings = {key: _on_host(value) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": list(range(number, number + len(names)))})
        number += len(names)
    return {"state": state, "param_groups": groups}


def load_whole_model_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Take this rank's part of whole tensors.

    Raises:
        ConfigError: the state is of another model.
    """
    with _of_another_model(f"a {type(module).__name__}"):
        module.load_state_dict(state, strict=strict)


def load_whole_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of what ``optimizer.state_dict()`` of the unsharded model is.

    Its parameters may be numbers or names.

    Raises:
        ConfigError: the state is of another model or optimizer; nothing was changed.
    """
    by_group = _names_by_group(module, optimizer)
    saved_groups, saved = state["param_groups"], state["state"]
    kind = type(optimizer).__name__
    if [len(names) for names in by_group] != [len(group["params"]) for group in saved_groups]:
        raise ConfigError(
            f"The checkpoint's optimizer has groups of {[len(group['params']) for group in saved_groups]} parameters, "
            f"and {kind} of {[len(names) for names in by_group]}. Make the optimizer as it was when it was saved."
        )
    of_name: dict[str, Mapping[str, Any]] = {}
    for names, group in zip(by_group, saved_groups, strict=True):
        for name, key in zip(names, group["params"], strict=True):
            of_name[name] = saved.get(key, {})
    stands_for = names_of_parameters(module)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    local: dict[torch.Tensor, dict[str, Any]] = {
        parameter: _local_state(parameter, stands_for[id(parameter)], of_name, kind) for parameter in parameters
    }
    _fill_all(module, optimizer, local, of_name)
    numbers = {parameter: index for index, parameter in enumerate(parameters)}
    groups = []
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        settings = {key: value for key, value in saved_group.items() if key not in ("params", "param_names")}
        groups.append({**settings, "params": [numbers[parameter] for parameter in group["params"]]})
    optimizer.load_state_dict(
        {"state": {numbers[parameter]: own for parameter, own in local.items() if own}, "param_groups": groups}
    )


def _local_state(
    parameter: nn.Parameter, names: tuple[str, ...], of_name: Mapping[str, Mapping[str, Any]], kind: str
) -> dict[str, Any]:
    """The state of ``parameter``, which may stand for several, with room for this rank's part of tensors."""
    local: dict[str, Any] = {}
    for key in dict.fromkeys(key for name in names for key in of_name[name]):
        given = {name: of_name[name].get(key) for name in names}
        absent = next((name for name, value in given.items() if value is None), None)
        if absent is not None:
            raise ConfigError(
                f"The checkpoint has no '{key}' of '{absent}' for {kind}, and of other parameters of its unit it has. "
                "Make the optimizer from model.parameters(), or load the checkpoint without it."
            )
        value = given[names[0]]
        if isinstance(value, torch.Tensor) and value.ndim > 0:
            local[key] = torch.zeros_like(parameter, dtype=value.dtype)
            continue
        different = next((name for name in names if not _equal(given[name], value)), None)
        if different is not None:
            raise ConfigError(
                f"'{key}' of '{names[0]}' and of '{different}' differ in the checkpoint, and {kind} has one for the "
                "unit of both. Make the optimizer from model.parameters(), or load the checkpoint without it."
            )
        local[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return local


def _fill_all(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    local: Mapping[torch.Tensor, dict[str, Any]],
    of_name: Mapping[str, Mapping[str, Any]],
) -> None:
    """Copy this rank's part of whole tensors into ``local``."""
    before = dict(optimizer.state)
    try:
        # As the optimizer's own it is told which part of which tensor each is.
        optimizer.state.clear()
        optimizer.state.update(local)
        told = optimizer_state(module, optimizer)["state"]
    finally:
        optimizer.state.clear()
        optimizer.state.update(before)
    for name, entries in told.items():
        for key, target in entries.items():
            whole = of_name[name][key]
            if not isinstance(target, torch.Tensor) or target.ndim == 0:
                continue
            if tuple(whole.shape) != tuple(target.shape):
                raise ConfigError(
                    f"'{key}' of '{name}' has shape {tuple(whole.shape)} in the checkpoint, and {tuple(target.shape)} "
                    "is the parameter's. Load the checkpoint into the model that it was saved from."
                )
            if isinstance(target, CheckpointTensor):
                for chunk in target.chunks:
                    chunk.view.copy_(whole[_slices(chunk.box.offsets, chunk.box.sizes)])
            else:
                target.copy_(whole)


def _names_by_group(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """What each group holds, in the order in which an optimizer of the unsharded model would."""
    stands_for = names_of_parameters(module)
    order = {name: index for index, (name, _) in enumerate(module.named_parameters())}
    by_group: list[list[str]] = []
    for group in optimizer_state(module, optimizer)["param_groups"]:
        by_group.append(list(group["params"]))
    for names, group in zip(by_group, optimizer.param_groups, strict=True):
        if any(len(stands_for[id(parameter)]) > 1 for parameter in group["params"]):
            names.sort(key=order.__getitem__)
    return by_group


def _gathered(values: Mapping[_Key, Any], device: torch.device) -> dict[_Key, Any]:
    """What ranks have of ``values`` put together, on rank 0, in host memory; empty on others."""
    everyone: list[dict[_Key, _Described]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {key: _describe(value) for key, value in values.items()})
    receives = dist.get_rank() == 0
    whole: dict[_Key, Any] = {}
    described: dict[_Key, _Described] = {}
    sent: list[_Sent] = []
    taken: set[tuple[_Key, tuple[int, ...]]] = set()
    for source, told in enumerate(everyone):
        for key, each in told.items():
            described.setdefault(key, each)
            if each.dtype is None:
                whole.setdefault(key, each.value)
            for index, (offsets, sizes) in enumerate(each.boxes):
                # Replicas have the same boxes.
                if (key, offsets) not in taken:
                    taken.add((key, offsets))
                    sent.append(_Sent(key, source, index, torch.Size(sizes).numel() * each.dtype.itemsize))  # type: ignore[union-attr]
    _require_all(described, sent)
    if receives:
        for key, each in described.items():
            if each.dtype is not None:
                whole[key] = torch.empty(each.shape or (), dtype=each.dtype)
    for batch in _batches(sent):
        _send(batch, values, everyone, whole, device)
    return whole if receives else {}


def _require_all(described: Mapping[_Key, _Described], sent: list[_Sent]) -> None:
    found: dict[_Key, int] = {}
    for each in sent:
        found[each.key] = found.get(each.key, 0) + each.nbytes
    for key, told in described.items():
        if told.dtype is not None and found.get(key, 0) != torch.Size(told.shape or ()).numel() * told.dtype.itemsize:
            raise UnsupportedError(
                f"The ranks together do not have all of '{'.'.join(key)}', as in a pretended world of ranks, so it "
                "cannot be saved whole. Save with state_dict_type='sharded'."
            )


def _send(
    batch: list[_Sent],
    values: Mapping[_Key, Any],
    everyone: list[dict[_Key, _Described]],
    whole: dict[_Key, Any],
    device: torch.device,
) -> None:
    source, rank = batch[0].source, dist.get_rank()
    if rank not in (source, 0):
        return
    if rank == source:
        parts = [_bytes(_box(values[each.key], each.box)) for each in batch]
        carried = torch.cat(parts).to(device)
    else:
        carried = torch.empty(sum(each.nbytes for each in batch), dtype=torch.uint8, device=device)
    if source != 0:
        if rank == source:
            dist.send(carried, 0)
            return
        dist.recv(carried, source)
    carried = carried.cpu()
    cursor = 0
    for each in batch:
        told = everyone[source][each.key]
        assert told.dtype is not None
        offsets, sizes = told.boxes[each.box]
        part = carried.narrow(0, cursor, each.nbytes).clone().view(told.dtype).view(sizes)
        whole[each.key][_slices(offsets, sizes)] = part
        cursor += each.nbytes


def _batches(sent: list[_Sent]) -> Iterator[list[_Sent]]:
    """Boxes of one rank that follow each other, as many as are sent at once."""
    batch: list[_Sent] = []
    size = 0
    for each in sent:
        if batch and (each.source != batch[0].source or size + each.nbytes > _BATCH_NBYTES):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.nbytes
    if batch:
        yield batch


def _describe(value: Any) -> _Described:
    if isinstance(value, CheckpointTensor):
        boxes = tuple((chunk.box.offsets, chunk.box.sizes) for chunk in value.chunks if chunk.box.numel)
        return _Described(None, tuple(value.shape), value.dtype, boxes)
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return _Described(None, tuple(value.shape), value.dtype, (((0,) * value.ndim, tuple(value.shape)),))
    return _Described(_on_host(value))


def _box(value: Any, index: int) -> torch.Tensor:
    if isinstance(value, CheckpointTensor):
        return [chunk.view for chunk in value.chunks if chunk.box.numel][index]
    tensor: torch.Tensor = value
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


@contextmanager
def _of_another_model(what: str) -> Iterator[None]:
    """Say what torch's list of names comes from."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).rstrip(" .")
        raise ConfigError(
            f"The checkpoint is not of {what} as it is here: {told}. Load it into the model that it was saved from."
        ) from error
