"""Whole tensors in host memory, gathered one unit after the other.

No rank has more than two units of a model, or one of an optimizer's state, whole on the device that computes, and
beside that what it was asked for, on the host.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError, StateError, UnsupportedError
from ..inspect import ShardedModel, ShardedParameter, ShardedUnit, is_inside, put_together
from ..interfaces import ReduceOp
from ..io.boxes import Box, box_within, disjoint
from .blocks import is_of_piece
from .contents import Joint, put_inside
from .sharded import CheckpointTensor, Holding, holdings
from .streaming import whole_weights


def require_whole(sharded: ShardedModel, call: str) -> None:
    """Refuse where other ranks' elements cannot be had. Raises UnsupportedError: saying so."""
    if sharded.collectives.world_size > 1 and not sharded.collectives.capabilities.can_communicate:
        raise UnsupportedError(
            f"{call} cannot give whole tensors on a rank of a pretended world of {sharded.collectives.world_size}: "
            "nothing travels there. Ask for the sharded form."
        )


def full_model_state(sharded: ShardedModel, wanted: Collection[str], *, everywhere: bool) -> dict[str, Any]:
    """As ``model_state``, of whole tensors, those in ``wanted`` alone: on every rank, or on rank 0."""
    found: dict[str, Any] = {}
    for names, tensors in whole_weights(sharded, "all" if everywhere else (0,), wanted):
        for name, tensor in put_inside(sharded, dict(zip(names, tensors, strict=True))).items():
            # What is of a class of its own was made for this.
            found[name] = _on_host(tensor) if type(tensor) is torch.Tensor else tensor.detach().to("cpu")
    return found


def full_optimizer_state(
    sharded: ShardedModel, joint: Joint, own: Mapping[str, Any], *, receives: bool
) -> dict[str, Any]:
    """As ``own``, which ``optimizer_state`` gave of ``joint``, of whole tensors."""
    held = holdings(sharded, joint.groups)
    specs = _specs(own["state"])
    parts = {
        (each.name, each.part.offset): specs.get(each.name, {})
        for holding in held.values()
        for each in holding.sharded
        if each.part is not None and each.piece is not None
    }
    shared = {name for given, holding in held.items() if joint.shares_work(given) for name in holding.names}
    extents = {
        (name, key): [chunk.box for chunk in value.chunks]
        for name, states in own["state"].items()
        for key, value in states.items()
        if isinstance(value, CheckpointTensor) and (name in shared or value.kept is not None)
    }
    mine = (specs, parts, extents)
    everyone = sharded.collectives.all_gather_object(mine) if sharded.collectives.world_size > 1 else [mine]
    _require_alike([each for _, each, _ in everyone])
    _require_whole(everyone, sharded.rank)
    known: dict[str, dict[str, Any]] = {}
    for each, *_ in everyone:
        for name, states in each.items():
            for key, value in states.items():
                known.setdefault(name, {}).setdefault(key, value)
    by_unit: dict[ShardedUnit, list[_Held]] = {}
    unit_of = {parameter.name: unit for unit in sharded.units for parameter in unit.parameters}
    for given, holding in held.items():
        if holding.sharded and not joint.shares_work(given):
            by_unit.setdefault(unit_of[holding.names[0]], []).append((given, holding))
    found: dict[str, dict[str, Any]] = {}
    # Of others, units are gathered.
    apart = {each for *_, boxes in everyone for each in boxes}
    known_of_units = {
        name: {key: value for key, value in states.items() if (name, key) not in apart}
        for name, states in known.items()
    }
    for unit in sharded.units:
        # Of parts, others need this rank's.
        if unit.shard is None and not (receives or any(each.part is not None for each in unit.parameters)):
            continue
        for name, key, tensor in _whole_states(unit, by_unit.get(unit, []), joint, known_of_units, receives=receives):
            found.setdefault(name, {})[key] = tensor
    for name, key, tensor in _from_any(sharded, own, known, [each for *_, each in everyone], receives=receives):
        found.setdefault(name, {})[key] = tensor
    if not receives:
        return {}
    for name, states in known.items():
        for key, value in states.items():
            if isinstance(value, _TensorSpec):
                if key not in found.get(name, {}):
                    found.setdefault(name, {})[key] = _on_host(own["state"][name][key])
            else:
                found.setdefault(name, {})[key] = value
    order = [name for group in own["param_groups"] for name in group["params"] if name in found]
    groups = [{setting: _on_host(value) for setting, value in group.items()} for group in own["param_groups"]]
    state = {name: {key: found[name][key] for key in known[name]} for name in order}
    shapes: dict[str, Sequence[int]] = {name: each.shape for name, each in sharded.module.named_parameters()}
    shapes.update({each.name: each.shape for unit in sharded.units for each in unit.parameters})
    for group in joint.groups:
        for given in group["params"]:
            name = held[given].names[0]
            if any(map(is_inside, state.get(name, {}))):
                state[name] = put_together(state[name], joint.like_in_blocks(given, group), shapes[name])
    return {"state": state, "param_groups": groups}


#: A parameter as the optimizer has it, which may be a ``DTensor``, and what it stands for.
_Held = tuple[nn.Parameter, Holding]


def _require_alike(everyone: Sequence[Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]]) -> None:
    """Raise StateError where the parts of a parameter have not the same state; on all ranks. By name and offset."""
    of_parts: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    for rank, states in enumerate(everyone):
        for part, its in states.items():
            numbers = [f"{key}={value!r}" for key, value in its.items() if not isinstance(value, _TensorSpec)]
            words = ", ".join([*numbers, *(key for key, value in its.items() if isinstance(value, _TensorSpec))])
            # Of several replicas one may keep it for all.
            if not of_parts.get(part, (rank, ""))[1]:
                of_parts[part] = rank, words
    known: dict[str, tuple[int, str]] = {}
    for (name, _), (rank, words) in of_parts.items():
        first, other = known.setdefault(name, (rank, words))
        if words != other:
            raise StateError(
                f"The optimizer's state of '{name}' is {other or 'none'} on rank {first} and {words or 'none'} on rank "
                f"{rank}, which hold different parts of the parameter: there is no state of the whole. Let every rank "
                "step its part as often, by a gradient of zeros where it has no other."
            )


def _require_whole(everyone: Sequence[tuple[_Specs, Any, Mapping[tuple[str, str], Sequence[Box]]]], rank: int) -> None:
    """Raise ConfigError where pieces have state in blocks that are not the whole parameter's; on all ranks."""
    shapes: dict[tuple[str, str], set[tuple[torch.dtype, tuple[int, ...]]]] = {}
    boxes: dict[tuple[str, str], set[Box]] = {}
    for specs, _, extents in everyone:
        for (name, key), found in extents.items():
            spec = specs[name][key]
            if spec.by_piece:
                shapes.setdefault((name, key), set()).add((spec.dtype, spec.shape))
                boxes.setdefault((name, key), set()).update(found)
    for (name, key), kinds in shapes.items():
        (_, shape), *others = kinds
        held = 0 if others else sum(part.numel for _, part in disjoint(list(boxes[name, key])))
        if is_of_piece(key) or held < math.prod(shape):
            raise ConfigError(
                f"The optimizer's state of '{name}' is in blocks, of which ranks cut some, or have pieces too small "
                f"for them (rank {rank}): there is no state of the whole. Save it by polyshard.checkpoint, for the "
                "same number of ranks."
            )


class _TensorSpec(NamedTuple):
    """Stands for a tensor whose elements are not sent with the names."""

    dtype: torch.dtype
    cut: bool
    shape: tuple[int, ...]
    by_piece: bool
    """Whether ranks may have pieces in different forms."""


_Specs = Mapping[str, Mapping[str, Any]]


def _specs(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """This rank's state of each parameter: scalars themselves, and the dtypes of tensors."""
    found: dict[str, dict[str, Any]] = {}
    for name, states in state.items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor) and (isinstance(value, CheckpointTensor) or value.numel() != 1):
                found.setdefault(name, {})[key] = _TensorSpec(
                    value.dtype,
                    isinstance(value, CheckpointTensor),
                    tuple(value.shape),
                    getattr(value, "kept", None) is not None,
                )
            else:
                found.setdefault(name, {})[key] = _on_host(value)
    return found


def _whole_states(
    unit: ShardedUnit, held: list[_Held], joint: Joint, known: Mapping[str, Mapping[str, Any]], *, receives: bool
) -> Iterator[tuple[str, str, torch.Tensor]]:
    wanted: dict[tuple[str, torch.dtype], list[ShardedParameter]] = {}
    for _, holding in held:
        for parameter in holding.sharded:
            for key, value in known.get(parameter.name, {}).items():
                if isinstance(value, _TensorSpec) and value.cut:
                    wanted.setdefault((key, value.dtype), []).append(parameter)
    for (key, dtype), parameters in wanted.items():
        own = unit.zeros(dtype)
        names = {parameter.name for parameter in parameters}
        for given, holding in held:
            value = joint.state_of(given).get(key)
            if isinstance(value, torch.Tensor) and value.ndim and value.shape == holding.parameter.shape:
                _put(own, holding, names, value)
        flat = unit.gather(own)
        for parameter in parameters:
            if receives or parameter.part is not None:
                found = parameter.whole(flat)
                if receives:
                    yield parameter.name, key, _on_host(found)
                del found
        # Not kept while the next one is gathered.
        del flat, own


def _from_any(
    sharded: ShardedModel,
    own: Mapping[str, Any],
    known: Mapping[str, Mapping[str, Any]],
    everyone: Sequence[Mapping[tuple[str, str], Sequence[Box]]],
    *,
    receives: bool,
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Whole states of which ranks with copies share the work; ``everyone``: the boxes that each rank has of each."""
    for name, key in sorted({each for boxes in everyone for each in boxes}):
        offers = [
            (rank, number, box)
            for rank, boxes in enumerate(everyone)
            for number, box in enumerate(boxes.get((name, key), ()))
        ]
        spec = known[name][key]
        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=sharded.collectives.device)
        for index, part in disjoint([box for *_, box in offers]):
            rank, number, box = offers[index]
            if rank == sharded.rank:
                view = own["state"][name][key].chunks[number].view
                box_within(tensor, Box.whole(tensor.shape), part).copy_(box_within(view, box, part))
        if sharded.collectives.world_size > 1 and tensor.numel():
            # Of others than one rank all are zeros: bytes can be added where numbers of eight bits cannot.
            carried = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            sharded.collectives.all_reduce(carried, op=ReduceOp.SUM).wait()
        if receives:
            yield name, key, _on_host(tensor)


def _put(own: torch.Tensor, holding: Holding, names: set[str], value: torch.Tensor) -> None:
    """Put this rank's part of a state into ``own`` (``[shard_numel]``), where its parameter lies in the master."""
    if holding.unit is not None:
        own.copy_(value)
        return
    (parameter,) = holding.sharded
    slot, piece = parameter.slot, parameter.piece
    if piece is None or parameter.name not in names or value.dtype != own.dtype:
        return
    # A parameter that is not cut has its own shape, which is no piece's.
    shown = slot.shown(piece.numel) if parameter.sharded else (slot.shape, slot.stride)
    own.as_strided(*shown, own.storage_offset() + piece.shard_offset).copy_(value)


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
