"""What an optimizer that needs whole tensors exchanges with whom: found at its first step, and kept.

[Note: one round]
Each rank has a piece of each tensor, or none. Some tensors are brought together at one *owner* each, which computes
something of the same shape; every rank gets back the part of that which belongs to its piece::

    pieces ── pack ──► outgoing ── all_to_all ──► incoming ──► wholes ── transform ──► results
    pieces ◄── update ── everyone ◄── all_gather ◄── outgoing ◄── all_to_all ◄── incoming ◄──┘

Blocks of ``outgoing`` are by owner, those of ``incoming`` by the rank that they are from; both serve both ways. Where
other groups hold the same shards (hybrid strategies), each group owns a part of the tensors, and the results for this
rank's pieces go to the ranks that hold the same ones in an ``all_gather``. Without shards nothing else is sent. Beside
tensor parallelism what arrives are parts of tensors, which cross over to become ``wholes``, and back, in one more
``all_to_all`` each: see [Note: parts across a mesh].
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ConfigError, RankMismatchError, UnsupportedError
from ..inspect import LocatedParameter, ShardedModel, find, is_dtensor
from ..interfaces import COMPLETED, Collectives, Work
from ..planning.layout import contiguous_stride
from .across import Across, Crossing, Part, copy_each, parted

#: Elements of one owner's tensors in a round at most, and at least: fewer leave products that do not fill a device.
_MOST_NUMEL = 1 << 26
_LEAST_NUMEL = 1 << 22
#: Rounds that are wanted: of one, no exchange would run beside what is computed.
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that this rank holds a piece of, or all of."""

    parameter: nn.Parameter
    name: str
    """Its fully-qualified name; empty for a parameter of no sharded model."""
    group: int
    """Index of its parameter group."""
    shape: tuple[int, ...]
    """Of the whole."""
    stride: tuple[int, ...]
    """Of the whole: in which order its elements lie."""
    pieces: tuple[tuple[int, int], ...]
    """For each shard the range of elements, in storage order, that it holds: ``(start, stop)``; ``(0, 0)`` for none. Of
    the elements of ``part`` where there is one."""
    part: Part | None = None
    """What the ranks that share shards hold of it; None where that is the whole."""
    dim: int = 0
    """The dimension along which it is cut into ``pieces``. Above 0 each is a block of what those ranks hold, in the
    order of ranks, and that is row-major."""

    @property
    def kind(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Those of one kind are computed with together."""
        return self.group, self.shape, self.stride

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Of what the ranks that share shards hold of it."""
        return self.shape if self.part is None else self.part.shape

    @property
    def held_numel(self) -> int:
        return math.prod(self.held_shape)

    def size(self, shard: int) -> int:
        start, stop = self.pieces[shard]
        return stop - start

    def piece_of(self, flat: torch.Tensor, offset: int, shard: int) -> torch.Tensor:
        """The piece of ``shard`` in what those ranks hold of it, which begins at ``offset`` of ``flat``: a view."""
        if not self.dim:
            start, stop = self.pieces[shard]
            return flat[offset + start : offset + stop]
        held = flat.narrow(0, offset, self.held_numel).view(self.held_shape)
        return held.tensor_split(len(self.pieces), self.dim)[shard]


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors that the same ranks hold, and the rounds in which they are brought together."""

    wholes: tuple[Whole, ...]
    rounds: tuple[Round, ...]
    exchanges: Exchanges
    owners: int
    """Number of ranks that the tensors are spread over."""
    device: torch.device
    """Where they are computed with."""
    model: Callable[[], ShardedModel | None]
    """The sharded model while it lives, which a plan must not extend; None for parameters of no sharded model."""


def plan_for(
    optimizer: torch.optim.Optimizer,
    work: Callable[[int, tuple[int, ...]], float],
    stacked: Callable[[int, tuple[int, ...]], bool],
    dtype: torch.dtype | None,
) -> list[Plan]:
    """Plans for all parameters of ``optimizer``, which may be of several models, sharded or not.

    Args:
        optimizer, work, dtype: As in ``WholeTensorOptimizer``, ``work`` by index of a group.
        stacked: Whether a tensor of the group and shape is a stack of tensors that are whole by themselves.

    Raises:
        ConfigError: it has a flat parameter, which stands for several tensors.
        UnsupportedError: collectives that cannot exchange pieces, or a tensor whose parts cannot be put together.
        RankMismatchError: ranks gave it other parameters, or in another order.
    """
    wholes: dict[_Key, list[Whole]] = {}
    orders: dict[_Key, tuple[int, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter, found in zip(group["params"], find(group["params"]), strict=True):
            whole, key = _whole(optimizer, parameter, number, found, stacked, dtype)
            if whole.numel:
                wholes.setdefault(key, []).append(whole)
                order = () if found is None else found.order
                orders[key] = min(orders.get(key, order), order)
    # Ranks must exchange in one order, in whichever they were given the parameters of several models, and whatever the
    # other groups are that a rank is in.
    keys = sorted(wholes, key=orders.__getitem__)
    _compare(optimizer, {key: wholes[key] for key in keys})
    return [_plan(key, tuple(wholes[key]), work) for key in keys]


class _Key(NamedTuple):
    model: ShardedModel | None
    """None for tensors that are not sharded."""
    groups: tuple[Collectives, ...]
    """Groups through which a value reaches all ranks with pieces of the same tensors."""
    peers: Peers
    dtype: torch.dtype
    """In which they travel."""
    device: torch.device


def _whole(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    group: int,
    found: LocatedParameter | None,
    stacked: Callable[[int, tuple[int, ...]], bool],
    dtype: torch.dtype | None,
) -> tuple[Whole, _Key]:
    if found is None:
        if is_dtensor(parameter):
            raise UnsupportedError(
                f"{type(optimizer).__name__} was given a DTensor of shape {tuple(parameter.shape)} that is in no unit. "
                "Shard its model (with strategy='no_shard' where nothing is to be cut), or give it to another "
                "optimizer."
            )
        pieces: tuple[tuple[int, int], ...] = ((0, parameter.numel()),)
        whole = Whole(parameter, "", group, tuple(parameter.shape), tuple(parameter.stride()), pieces)
        return whole, _Key(None, (), Peers(None, None, None), dtype or parameter.dtype, parameter.device)
    unit, rank = found.unit, found.model.rank
    if found.position is None:
        raise ConfigError(
            f"{type(optimizer).__name__} needs whole tensors, but was given the flat parameter of unit '{unit.name}' "
            f"(rank {rank}). Give it the model's own parameters."
        )
    shard = unit.shard
    if shard is not None and not shard.capabilities.exchanges:
        raise UnsupportedError(
            f"{type(optimizer).__name__} brings whole tensors together by all_to_all, which "
            f"{type(shard).__module__}:{type(shard).__name__} does not have (rank {rank}). Choose collectives that "
            "have it, or strategy='no_shard'."
        )
    slot = unit.layout.slots[found.position]
    pieces = ((0, slot.numel),)
    if shard is not None:
        pieces = tuple(unit.layout.range_of(found.position, each) for each in range(shard.world_size))
    its = unit.parameters[found.position]
    stride = contiguous_stride(slot.shape) if slot.dim else slot.stride
    whole = Whole(parameter, its.name, group, slot.shape, stride, pieces, dim=slot.dim)
    across = None
    if its.part is not None:
        stack, where = stacked(group, its.part.shape), f"'{its.name}' (rank {rank})"
        shape, across, boxes = parted(its.part, stack, where, type(optimizer).__name__)
        if across is not None:
            # In one order on all of these ranks, in whichever the elements of their parts lie.
            part = Part(slot.shape, stride, boxes)
            whole = replace(whole, shape=shape, stride=contiguous_stride(shape), part=part)
    peers = Peers(shard, unit.replicate, across)
    return whole, _Key(found.model, unit.groups, peers, dtype or unit.grad_dtype, unit.device)


def _plan(key: _Key, wholes: tuple[Whole, ...], work: Callable[[int, tuple[int, ...]], float]) -> Plan:
    model, _, peers, dtype, device = key
    owners = math.prod(peers.sizes)
    works = [work(each.group, each.shape) for each in wholes]
    numels = [each.numel for each in wholes]
    most = min(_MOST_NUMEL, max(_LEAST_NUMEL, sum(numels) // owners // _ROUNDS))
    batches = rounds_of(owners_of(works, owners), owners, works, [each.kind for each in wholes], numels, most)
    rounds = tuple(Round(wholes, batch, peers, dtype, device) for batch in batches)
    group = peers.shard or peers.replicate
    ordered = group is not None and group.capabilities.stream_ordered and device.type == "cuda"
    reference = model.reference() if model is not None else lambda: None
    return Plan(wholes, rounds, Exchanges(device if ordered else None), owners, device, reference)


def _compare(optimizer: torch.optim.Optimizer, wholes: Mapping[_Key, list[Whole]]) -> None:
    """Raise on every rank where ranks do not bring the same tensors in the same order.

    Those compare that exchange something: ranks may have experts that other ranks do not have.
    """
    for model in dict.fromkeys(key.model for key in wholes):
        if model is None or not model.collectives.capabilities.can_communicate:
            continue
        mine: dict[object, list[object]] = {}
        for key, members in wholes.items():
            if key.model == model:
                entries = [[each.name, each.group, each.shape, str(key.dtype)] for each in members]
                for among in (key.groups, key.peers.across):
                    mine.setdefault(among, []).extend(entries)
        world = (model.collectives,)
        # Of all units: a rank that was given nothing of one is asked as well.
        groups = [each for each in dict.fromkeys(unit.groups for unit in model.units) if each != world]
        asked: list[tuple[object, Collectives | Across]] = [(each, group) for each in groups for group in each]
        asked += [(each, each) for each in _across(model)]
        differences = [_difference(model.rank, mine.get(key, []), among.all_gather_object) for key, among in asked]
        # Those who exchange nothing with the ranks that differ raise as well.
        problem = next(filter(None, differences), "")
        different = _difference(model.rank, mine.get(world, []), model.collectives.all_gather_object, problem)
        if different:
            raise RankMismatchError(
                f"{type(optimizer).__name__} was given other parameters, or in another order, on some ranks "
                f"({different}). Give every rank the same parameters in the same groups."
            )


def _difference(rank: int, mine: list[object], ask: Callable[[Any], list[Any]], problem: str = "") -> str:
    """Which rank differs, of those that ``ask`` asks, or what one of them was ``problem``; empty for no difference."""
    # Of thousands of ranks, the texts would fill memory.
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    everyone = ask((rank, digest, problem))
    differing = (f"rank {other} differs from rank {rank}" for other, theirs, _ in everyone if theirs != digest)
    return next(differing, "") or next((theirs for _, _, theirs in everyone if theirs), "")


def _across(model: ShardedModel) -> list[Across]:
    """All ranks that may put tensors together with this one, group by group, in one order on all of them."""
    parts = {each.name: each.part for unit in model.units for each in unit.parameters if each.part is not None}
    return list(
        dict.fromkeys(
            Across.along(part.mesh, axis)
            for _, part in sorted(parts.items(), key=lambda item: item[0])
            for axis, placement in enumerate(part.placements)
            if placement.is_shard() and part.mesh.size(axis) > 1
        )
    )


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold the pieces of a tensor."""

    shard: Collectives | None
    """Those that hold different pieces; None where this one holds the whole."""
    replicate: Collectives | None
    """Those that hold the same piece; None where there is no other."""
    across: Across | None
    """Those that hold pieces of other parts, of tensors that have to be put together; None where there is no other."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many ranks hold different pieces and the same piece, and how many parts tensors consist of."""
        return (
            1 if self.shard is None else self.shard.world_size,
            1 if self.replicate is None else self.replicate.world_size,
            1 if self.across is None else self.across.size,
        )

    @property
    def places(self) -> tuple[int, int, int]:
        """Which of these this rank is, and has."""
        shard, replica, part = (0 if each is None else each.rank for each in (self.shard, self.replicate, self.across))
        return shard, replica, part


@dataclass(frozen=True, slots=True)
class SentPiece:
    """This rank's piece of one tensor, in the block of what it sends."""

    index: int
    """Which tensor."""
    offset: int
    """First element in the block."""
    numel: int
    """Number of elements."""


class Round:
    """Where everything of one round lies. Made once; a step only runs it.

    Args:
        wholes: all tensors of the plan.
        batches: for each owner, which of ``wholes`` it owns in this round, all of one size; owner
            ``(replica * shards + shard) * parts + part``.
        peers: the ranks that hold them.
        dtype, device: in which and where they travel, and are computed with.
    """

    def __init__(
        self,
        wholes: Sequence[Whole],
        batches: Sequence[Sequence[int]],
        peers: Peers,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._peers = peers
        self._dtype = dtype
        self._device = device
        (shards, replicas, parts), (index, self._replica, part) = peers.sizes, peers.places
        # By replica and shard: tensors of which that rank puts together what its group holds.
        together = [[i for each in batches[at : at + parts] for i in each] for at in range(0, len(batches), parts)]
        mine = together[self._replica * shards : (self._replica + 1) * shards]
        here = [wholes[each] for each in mine[index]]
        crossing = batches[(self._replica * shards + index) * parts :][:parts]
        #: Which tensors this rank owns.
        self.own = tuple(crossing[part])
        self._numel = wholes[self.own[0]].numel if self.own else 0
        #: For each replica, this rank's pieces of what that owns.
        self.held = [_sent(wholes, together[each * shards : (each + 1) * shards], index) for each in range(replicas)]
        self._sizes = [sum(each.numel for each in held) for held in self.held]
        self._outgoing = [sum(wholes[each].size(index) for each in owned) for owned in mine]
        self._incoming = [sum(each.size(source) for each in here) for source in range(shards)]
        # One behind the other. Their pieces, in the order of the memory that arrives.
        *offsets, self._together = itertools.accumulate((each.held_numel for each in here), initial=0)
        self._arrivals = [
            (each, source, offset)
            for source in range(shards)
            for offset, each in zip(offsets, here, strict=True)
            if each.size(source)
        ]
        self._crossing: Crossing | None = None
        if peers.across is not None:
            shape = wholes[self.own[0]].shape if self.own else (0,)
            cut = [[its for each in batch if (its := wholes[each].part) is not None] for batch in crossing]
            self._crossing = Crossing(peers.across, cut, shape)

    @property
    def puts_together(self) -> bool:
        """Whether this rank puts tensors together: those that it owns, or parts that cross over to another owner."""
        return bool(self.own) or self._crossing is not None

    @property
    def sends(self) -> Sequence[SentPiece]:
        return self.held[self._replica]

    def outgoing(self) -> torch.Tensor:
        """Memory for what this rank sends, and gets back."""
        return self._empty(self._sizes[self._replica])

    def incoming(self, outgoing: torch.Tensor) -> torch.Tensor:
        """Memory for what this rank receives, and sends back: ``outgoing`` itself where nothing is cut."""
        return outgoing if self._peers.shard is None else self._empty(sum(self._incoming))

    def everyone(self, outgoing: torch.Tensor) -> torch.Tensor:
        """Memory for the results of this rank's pieces, a row for each replica: ``outgoing`` where there is one."""
        if self._peers.replicate is None:
            return outgoing.unsqueeze(0)
        longest = max(self._sizes)
        return self._empty(len(self._sizes) * longest).view(len(self._sizes), longest)

    def _empty(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device)

    def bring(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> Work:
        """Issue what brings pieces to their owners."""
        shard = self._peers.shard
        return COMPLETED if shard is None else shard.all_to_all(incoming, self._incoming, outgoing, self._outgoing)

    def bring_back(self, outgoing: torch.Tensor, incoming: torch.Tensor, everyone: torch.Tensor) -> Work:
        """Issue what brings parts of results to the ranks whose pieces they belong to."""
        shard, replicate = self._peers.shard, self._peers.replicate
        work = COMPLETED if shard is None else shard.all_to_all(outgoing, self._outgoing, incoming, self._incoming)
        if replicate is None or not everyone.numel():
            return work
        work.wait()
        own = everyone[self._replica]
        own[: outgoing.numel()].copy_(outgoing)
        return replicate.all_gather(everyone.view(-1), own)

    def wholes(self, incoming: torch.Tensor) -> torch.Tensor:
        """The whole tensors of this owner, ``[count, numel]`` in storage order, of what arrived."""
        together = self._empty(self._together)
        blocks, parts = self._pieces(incoming, together)
        copy_each(parts, blocks)
        wholes = together if self._crossing is None else self._crossing.bring(together)
        return wholes.view(len(self.own), self._numel)

    def pack(self, incoming: torch.Tensor, results: torch.Tensor) -> None:
        """Write ``results`` (``[count, numel]``, storage order) where they are brought back from."""
        together = results.view(-1) if self._crossing is None else self._crossing.bring_back(results)
        copy_each(*self._pieces(incoming, together))

    def _pieces(self, incoming: torch.Tensor, together: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The pieces as they arrive and leave, and where they are in what is put together."""
        parts = [whole.piece_of(together, offset, source) for whole, source, offset in self._arrivals]
        blocks = torch.split(incoming, [part.numel() for part in parts])
        return [block.view(part.shape) for block, part in zip(blocks, parts, strict=True)], parts

    def results(self, everyone: torch.Tensor) -> dict[int, torch.Tensor]:
        """By tensor, the result of this rank's piece: 1-D, in storage order."""
        return {
            each.index: row.narrow(0, each.offset, each.numel)
            for row, held in zip(everyone, self.held, strict=True)
            for each in held
        }


def _sent(wholes: Sequence[Whole], owners: Sequence[Sequence[int]], shard: int) -> tuple[SentPiece, ...]:
    found, cursor = [], 0
    for index in (each for owned in owners for each in owned):
        numel = wholes[index].size(shard)
        # Those without elements, too: their state is a ``DTensor`` on each rank.
        found.append(SentPiece(index, cursor, numel))
        cursor += numel
    return tuple(found)


class Exchanges:
    """Runs exchanges beside what the optimizer computes, in the order in which they are issued.

    Stream-ordered collectives on CUDA run on a stream of its own. Memory that is used there comes from the pool of the
    stream that computes, and may be freed once that one has been ordered behind the exchange.
    """

    def __init__(self, device: torch.device | None) -> None:
        """``device``: of the stream; None for operations that run on a backend's own threads until ``Work.wait``."""
        self._stream: torch.cuda.Stream | None = None
        if device is not None:
            # High priority: what waits behind compute kernels delays the compute that waits for it.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def issue(self, start: Callable[[], Work]) -> Callable[[], None]:
        """Start an exchange behind what was computed so far; returns what orders later compute behind it."""
        if self._stream is None:
            return start().wait
        computing = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            start().wait()
            arrived = self._stream.record_event()
        return lambda: computing.wait_event(arrived)


def owners_of(works: Sequence[float], count: int) -> list[int]:
    """An owner in ``range(count)`` for each of ``works``, so that the largest sum of one is near the least possible.

    The longest first, each to whoever has least to do: at most 4/3 of the least possible (Graham 1969, "Bounds on
    multiprocessing timing anomalies").
    """
    loads = [(0.0, owner) for owner in range(count)]
    owners = [0] * len(works)
    for index in sorted(range(len(works)), key=lambda index: (-works[index], index)):
        load, owner = heapq.heappop(loads)
        owners[index] = owner
        heapq.heappush(loads, (load + works[index], owner))
    return owners


def rounds_of(
    owners: Sequence[int],
    count: int,
    works: Sequence[float],
    kinds: Sequence[Hashable],
    numels: Sequence[int],
    most: int,
) -> list[list[list[int]]]:
    """For each round, what each owner computes in it: indices of one kind, of at most ``most`` elements or one alone.

    Each owner goes from long work to short, so that those of one round take about as long as each other.
    """
    rounds: list[list[list[int]]] = []
    for owner in range(count):
        own = [index for index, its in enumerate(owners) if its == owner]
        own.sort(key=lambda index: (-works[index], index))
        # Kinds in the order of their first: one that is as long as another must not be split by it.
        by_kind: dict[Hashable, list[int]] = {}
        for index in own:
            by_kind.setdefault(kinds[index], []).append(index)
        batches: list[list[int]] = []
        for members in by_kind.values():
            together = max(1, most // max(1, numels[members[0]]))
            batches += [members[start : start + together] for start in range(0, len(members), together)]
        for number, batch in enumerate(batches):
            if number == len(rounds):
                rounds.append([[] for _ in range(count)])
            rounds[number][owner] = batch
    return rounds
