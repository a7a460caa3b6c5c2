"""Whole tensors in host memory: a model's one unit after the other, an optimizer's one tensor after the other.

No rank has more than two units of a model, or one tensor of an optimizer, whole on the device that computes, and beside
that what it was asked for, on the host.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, StateError, UnsupportedError
from ..inspect import ShardedModel, put_together, role_of
from ..interfaces import ReduceOp
from ..io.boxes import Box, Chunk, box_within, disjoint
from .blocks import is_in_blocks, is_of_piece
from .contents import Joint, put_inside
from .sharded import CheckpointTensor, holdings
from .source import chunks_of
from .streaming import whole_weights


def require_whole(sharded: ShardedModel, call: str) -> None:
    """Refuse where other ranks' elements cannot be had. Raises UnsupportedError: saying so."""
    if sharded.collectives.world_size > 1 and not sharded.collectives.capabilities.can_communicate:
        raise UnsupportedError(
            f"{call} cannot give whole tensors on a rank of a pretended world of {sharded.collectives.world_size}: "
            "nothing travels there. Ask for DTensors."
        )


def full_model_state(sharded: ShardedModel, wanted: Collection[str], *, everywhere: bool) -> dict[str, Any]:
    """As ``model_state``, of whole tensors, those in ``wanted`` alone: on every rank, or on rank 0."""
    found: dict[str, Any] = {}
    for names, tensors in whole_weights(sharded, "all" if everywhere else (0,), wanted):
        for name, tensor in put_inside(sharded, dict(zip(names, tensors, strict=True))).items():
            # What is of a class of its own was made for this.
            found[name] = _on_host(tensor) if type(tensor) is torch.Tensor else tensor.detach().to("cpu")
    return found


class _Told(NamedTuple):
    """What a rank tells others of a state of a parameter: its value, or what it has of a tensor."""

    value: Any = None
    dtype: torch.dtype | None = None
    """None for a value."""
    shape: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()


#: By key of a parameter's state, what ranks told of it.
_Known = Mapping[str, Mapping[int, _Told]]


def full_optimizer_state(
    sharded: ShardedModel, joint: Joint, own: Mapping[str, Any], *, receives: bool
) -> dict[str, Any]:
    """As ``own``, which ``optimizer_state`` gave of ``joint``, of whole tensors. Every rank calls it.

    Ranks may have states that others lack, as where one of several replicas keeps a momentum for all of them.

    Raises StateError, ConfigError: what ranks have is no state of the whole; on all of them.
    """
    mine = {name: {key: _told(value) for key, value in its.items()} for name, its in own["state"].items()}
    everyone = sharded.collectives.all_gather_object(mine) if sharded.collectives.world_size > 1 else [mine]
    known: dict[str, dict[str, dict[int, _Told]]] = {}
    for rank, states in enumerate(everyone):
        for name, its in states.items():
            for key, told in its.items():
                known.setdefault(name, {}).setdefault(key, {})[rank] = told
    held = holdings(sharded, joint.groups)
    parts = {each.name for holding in held.values() for each in holding.stands_for if each.part is not None}
    for name, by_key in known.items():
        _require_whole(name, by_key, sharded, in_parts=name in parts)
    found: dict[str, dict[str, Any]] = {}
    for name, by_key in known.items():
        for key, ranks in by_key.items():
            value, dtype, *_ = next(iter(ranks.values()))
            if dtype is not None:
                value = _gathered(sharded, own["state"].get(name, {}).get(key), ranks)
            if receives:
                found.setdefault(name, {})[key] = value.cpu() if isinstance(value, torch.Tensor) else value
            del value
    if not receives:
        return {}
    for group in joint.groups:
        for parameter in group["params"]:
            holding = held[parameter]
            name = holding.names[0]
            if any(map(role_of, found.get(name, {}))):
                like, shape = joint.like_in_blocks(parameter, group), holding.stands_for[0].shape
                found[name] = put_together(found[name], like, shape)
    order = [name for group in own["param_groups"] for name in group["params"] if name in found]
    groups = [{setting: _on_host(value) for setting, value in group.items()} for group in own["param_groups"]]
    return {"state": {name: found[name] for name in order}, "param_groups": groups}


def _told(value: Any) -> _Told:
    if isinstance(value, torch.Tensor) and (isinstance(value, CheckpointTensor) or value.numel() != 1):
        boxes = tuple(chunk.box for chunk in chunks_of(value))
        return _Told(None, value.dtype, tuple(value.shape), boxes)
    return _Told(_on_host(value))


def _require_whole(name: str, states: _Known, sharded: ShardedModel, *, in_parts: bool) -> None:
    """Raise where ranks have parts of a state, or parts of a parameter with states, that do not go together."""
    for key, ranks in states.items():
        kinds = {(each.dtype, each.shape) for each in ranks.values()}
        boxes = [box for each in ranks.values() for box in each.boxes]
        (_, shape), *others = kinds
        held = sum(part.numel for _, part in disjoint(boxes))
        is_whole = not others and (held == math.prod(shape) or not boxes)
        if is_of_piece(key) or (is_in_blocks(states) and not is_whole):
            raise ConfigError(
                f"The optimizer's state of '{name}' is in blocks, of which ranks cut some, or have pieces too small "
                f"for them (rank {sharded.rank}): there is no state of the whole. Save it by polyshard.checkpoint, for "
                "the same number of ranks."
            )
        numbers = {repr(each.value) for each in ranks.values()}
        if not is_whole or (in_parts and len(numbers) > 1):
            words = [_words(states, rank) for rank in range(sharded.collectives.world_size)]
            other = next((rank for rank, each in enumerate(words) if each != words[0]), 0)
            raise StateError(
                f"The optimizer's state of '{name}' is {words[0]} on rank 0 and {words[other]} on rank {other}: there "
                "is no state of the whole. Let every rank step its part as often, by a gradient of zeros where it has "
                "no other."
            )


def _words(states: _Known, rank: int) -> str:
    own = {key: ranks[rank] for key, ranks in states.items() if rank in ranks}
    return ", ".join(key if told.dtype else f"{key}={told.value!r}" for key, told in own.items()) or "none"


def _gathered(sharded: ShardedModel, value: torch.Tensor | None, ranks: Mapping[int, _Told]) -> torch.Tensor:
    """All of a tensor of which this rank has ``value``. Every rank calls it."""
    told = next(iter(ranks.values()))
    whole = torch.zeros(told.shape, dtype=told.dtype, device=sharded.collectives.device)
    own: Sequence[Chunk] = () if value is None else list(chunks_of(value))
    offers = [(rank, number, box) for rank, each in ranks.items() for number, box in enumerate(each.boxes)]
    for index, part in disjoint([box for *_, box in offers]):
        rank, number, box = offers[index]
        if rank == sharded.rank:
            box_within(whole, Box.whole(told.shape), part).copy_(box_within(own[number].view, box, part))
    if sharded.collectives.world_size > 1 and whole.numel():
        # Each element is one rank's, and zero on others: bytes can be added, of any dtype, and no bit is another.
        sharded.collectives.all_reduce(whole.view(-1).view(torch.uint8), op=ReduceOp.SUM).wait()
    return whole


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
