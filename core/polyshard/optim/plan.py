"""What an optimizer that needs whole tensors exchanges with whom: found at its first step, and kept."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..errors import ConfigError, RankMismatchError, UnsupportedError
from ..functions.lookup import Found, live_roots
from ..interfaces import Collectives
from ..planning.layout import product
from ..runtime.root import Root
from .beside import Beside, OnHost, OnStream
from .exchange import Cut, Peers, Round
from .owners import owners_of, rounds_of

#: Elements of one owner's tensors in a round at most, and at least: fewer leave products that do not fill a device.
_MOST_NUMEL = 1 << 26
_LEAST_NUMEL = 1 << 22
#: Rounds that are wanted: of one, no exchange would run beside what is computed.
_ROUNDS = 8


class _Key(NamedTuple):
    """The same for tensors that are exchanged together."""

    root: Root | None
    """Their model; None where it is not sharded."""
    peers: Peers
    dtype: torch.dtype
    """In which they travel."""
    device: torch.device


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of which this rank holds a piece, or all of it."""

    parameter: nn.Parameter
    name: str
    """Its fully-qualified name; empty for a parameter of no sharded model."""
    group: int
    """Index of its parameter group."""
    shape: tuple[int, ...]
    """Of the whole."""
    stride: tuple[int, ...]
    """Of the whole: in which order its elements lie."""

    @property
    def kind(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Those of one kind are computed with together."""
        return self.group, self.shape, self.stride


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors that the same ranks hold, and the rounds in which they are brought together."""

    wholes: tuple[Whole, ...]
    rounds: tuple[Round, ...]
    beside: Beside
    owners: int
    """Number of ranks that the tensors are spread over."""
    device: torch.device
    """Where they are computed with."""
    root: weakref.ref[Root] | None
    """Of the sharded model; a plan must not keep one alive. None for parameters of no sharded model."""


def units_of(optimizer: torch.optim.Optimizer) -> list[object]:
    """For each parameter the unit that it lies in, to be compared: plans hold for as long as these do."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [None if found is None else weakref.ref(found.unit) for found in live_roots.find(parameters)]


def plan_for(
    optimizer: torch.optim.Optimizer, work: Callable[[int, tuple[int, ...]], float], dtype: torch.dtype | None
) -> list[Plan]:
    """Plans for all parameters of ``optimizer``.

    Args:
        optimizer: its parameters may be of several models, sharded or not.
        work: how long a tensor of the group and shape takes, in any unit.
        dtype: in which tensors travel and are computed with; None for that of their gradients.

    Raises:
        ConfigError: it has a flat parameter, which stands for several tensors.
        UnsupportedError: collectives that cannot exchange pieces.
        RankMismatchError: ranks gave it other parameters, or in another order.
    """
    wholes: dict[_Key, list[Whole]] = {}
    founds: dict[_Key, list[Found | None]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter, found in zip(group["params"], live_roots.find(group["params"]), strict=True):
            whole, key = _whole(optimizer, parameter, number, found, dtype)
            if 0 in whole.shape:
                continue
            wholes.setdefault(key, []).append(whole)
            founds.setdefault(key, []).append(found)
    # Ranks must exchange in one order, in whichever they were given the parameters of several models.
    keys = sorted(wholes, key=lambda key: min((each.order for each in founds[key] if each is not None), default=()))
    _compare(optimizer, {key: wholes[key] for key in keys})
    return [_plan(key, tuple(wholes[key]), founds[key], work) for key in keys]


def _whole(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    group: int,
    found: Found | None,
    dtype: torch.dtype | None,
) -> tuple[Whole, _Key]:
    if found is None:
        whole = Whole(parameter, "", group, tuple(parameter.shape), tuple(parameter.stride()))
        return whole, _Key(None, Peers(None, None), dtype or parameter.dtype, parameter.device)
    unit = found.unit
    if found.slot is None:
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors, but was given the flat parameter of unit '{unit.name}' "
            f"(rank {found.root.rank}). Give it the model's own parameters."
        )
    shard = unit.grid.shard
    if shard is not None and not shard.capabilities.exchanges:
        raise UnsupportedError(
            f"{type(optimizer).__name__} brings whole tensors together by all_to_all, which "
            f"{type(shard).__module__}:{type(shard).__name__} does not have (rank {found.root.rank}). Choose "
            "collectives that have it, or strategy='no_shard'."
        )
    slot = unit.layout.slots[found.slot]
    whole = Whole(parameter, unit.parameters[found.slot].names[0], group, slot.shape, slot.stride)
    return whole, _Key(found.root, Peers(shard, unit.grid.replicate), dtype or unit.dtypes.grad, unit.spec.device)


def _plan(
    key: _Key,
    wholes: tuple[Whole, ...],
    founds: Sequence[Found | None],
    work: Callable[[int, tuple[int, ...]], float],
) -> Plan:
    root, peers, dtype, device = key
    cuts = _cuts(wholes, founds, peers.shards)
    owners = peers.shards * peers.replicas
    works = [work(each.group, each.shape) for each in wholes]
    numels = [cut.numel for cut in cuts]
    most = min(_MOST_NUMEL, max(_LEAST_NUMEL, sum(numels) // owners // _ROUNDS))
    batches = rounds_of(owners_of(works, owners), owners, works, [each.kind for each in wholes], numels, most)
    rounds = tuple(Round(cuts, batch, peers, dtype, device) for batch in batches)
    group = peers.shard or peers.replicate
    ordered = group is not None and group.capabilities.stream_ordered and device.type == "cuda"
    return Plan(
        wholes,
        rounds,
        OnStream(device) if ordered else OnHost(),
        owners,
        device,
        None if root is None else weakref.ref(root),
    )


def _cuts(wholes: Sequence[Whole], founds: Sequence[Found | None], shards: int) -> list[Cut]:
    cuts = []
    for whole, found in zip(wholes, founds, strict=True):
        numel = product(whole.shape)
        if found is None or found.slot is None or found.unit.grid.shard is None:
            cuts.append(Cut(numel, ((0, numel),)))
            continue
        layout, slot = found.unit.layout, found.slot
        cuts.append(Cut(numel, tuple(layout.range_of(slot, rank) for rank in range(shards))))
    return cuts


def _compare(
    optimizer: torch.optim.Optimizer,
    wholes: Mapping[_Key, list[Whole]],
) -> None:
    """Raise on every rank where ranks do not bring the same tensors in the same order."""
    told: dict[Collectives, list[object]] = {}
    for key, members in wholes.items():
        if key.root is not None:
            exchanged = told.setdefault(key.root.collectives, [])
            exchanged.extend([each.name, each.group, each.shape, str(key.dtype)] for each in members)
    for collectives, mine in told.items():
        if not collectives.capabilities.can_communicate:
            continue
        # Of thousands of ranks, the texts would fill memory.
        digest = hashlib.sha256(json.dumps(mine).encode()).digest()
        everyone = collectives.all_gather_object(digest)
        other = next((rank for rank, theirs in enumerate(everyone) if theirs != digest), None)
        if other is not None:
            where = f"rank {other} differs from rank {collectives.rank}"
            raise RankMismatchError(
                f"{type(optimizer).__name__} was given other parameters, or in another order, on some ranks ({where}). "
                "Give every rank the same parameters in the same groups."
            )
