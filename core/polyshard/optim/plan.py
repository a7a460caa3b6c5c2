"""What an optimizer that needs whole tensors exchanges with whom: found at its first step, and kept.

[Note: one round]
Each rank has a piece of each tensor, or none. Some tensors are brought together at one *owner* each, which computes
something of the same shape; every rank gets back the part of that which belongs to its piece::

    pieces ── pack ──► outgoing ── all_to_all ──► incoming ──► wholes ── transform ──► results
    pieces ◄── update ── everyone ◄── all_gather ◄── outgoing ◄── all_to_all ◄── incoming ◄──┘

Blocks of ``outgoing`` are by owner, those of ``incoming`` by the rank that they are from; both serve both ways. Where
other groups hold the same shards (hybrid strategies), each group owns a part of the tensors, and the results for this
rank's pieces go to the ranks that hold the same ones in an ``all_gather``. Without shards nothing else is sent.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from .. import _torch_private
from ..errors import ConfigError, RankMismatchError, UnsupportedError
from ..inspect import LocatedParameter, ShardedModel, find
from ..interfaces import COMPLETED, Collectives, Work

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
    """For each shard the range of elements, in storage order, that it holds: ``(start, stop)``; ``(0, 0)`` for none."""

    @property
    def kind(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Those of one kind are computed with together."""
        return self.group, self.shape, self.stride

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def size(self, shard: int) -> int:
        start, stop = self.pieces[shard]
        return stop - start


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
    optimizer: torch.optim.Optimizer, work: Callable[[int, tuple[int, ...]], float], dtype: torch.dtype | None
) -> list[Plan]:
    """Plans for all parameters of ``optimizer``, which may be of several models, sharded or not.

    ``work``: how long a tensor of the group and shape takes, in any unit. ``dtype``: in which tensors travel and are
    computed with; None for that of their gradients.

    Raises:
        ConfigError: it has a flat parameter, which stands for several tensors.
        UnsupportedError: collectives that cannot exchange pieces.
        RankMismatchError: ranks gave it other parameters, or in another order.
    """
    wholes: dict[_Key, list[Whole]] = {}
    orders: dict[_Key, tuple[int, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter, found in zip(group["params"], find(group["params"]), strict=True):
            whole, key = _whole(optimizer, parameter, number, found, dtype)
            if whole.numel:
                wholes.setdefault(key, []).append(whole)
                order = () if found is None else found.order
                orders[key] = min(orders.get(key, order), order)
    # Ranks must exchange in one order, in whichever they were given the parameters of several models.
    keys = sorted(wholes, key=orders.__getitem__)
    _compare(optimizer, {key: wholes[key] for key in keys})
    return [_plan(key, tuple(wholes[key]), work) for key in keys]


class _Key(NamedTuple):
    model: ShardedModel | None
    """None for tensors that are not sharded."""
    peers: Peers
    dtype: torch.dtype
    """In which they travel."""
    device: torch.device


def _whole(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    group: int,
    found: LocatedParameter | None,
    dtype: torch.dtype | None,
) -> tuple[Whole, _Key]:
    if found is None:
        pieces: tuple[tuple[int, int], ...] = ((0, parameter.numel()),)
        whole = Whole(parameter, "", group, tuple(parameter.shape), tuple(parameter.stride()), pieces)
        return whole, _Key(None, Peers(None, None), dtype or parameter.dtype, parameter.device)
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
    whole = Whole(parameter, unit.parameters[found.position].name, group, slot.shape, slot.stride, pieces)
    return whole, _Key(found.model, Peers(shard, unit.replicate), dtype or unit.grad_dtype, unit.device)


def _plan(key: _Key, wholes: tuple[Whole, ...], work: Callable[[int, tuple[int, ...]], float]) -> Plan:
    model, peers, dtype, device = key
    owners = peers.shards * peers.replicas
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
    """Raise on every rank where ranks do not bring the same tensors in the same order."""
    compared: dict[Collectives, list[object]] = {}
    for key, members in wholes.items():
        if key.model is not None:
            exchanged = compared.setdefault(key.model.collectives, [])
            exchanged.extend([each.name, each.group, each.shape, str(key.dtype)] for each in members)
    for collectives, mine in compared.items():
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


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold the pieces of a tensor."""

    shard: Collectives | None
    """Those that hold different pieces; None where this one holds the whole."""
    replicate: Collectives | None
    """Those that hold the same piece; None where there is no other."""

    @property
    def shards(self) -> int:
        return 1 if self.shard is None else self.shard.world_size

    @property
    def replicas(self) -> int:
        """Number of ranks that hold each piece."""
        return 1 if self.replicate is None else self.replicate.world_size

    @property
    def replica(self) -> int:
        """Which of these this rank is."""
        return 0 if self.replicate is None else self.replicate.rank

    @property
    def index(self) -> int:
        return 0 if self.shard is None else self.shard.rank


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
            ``replica * shards + shard``.
        peers: the ranks that hold them.
        dtype: in which they travel, and are computed with.
        device: where they travel, and are computed with.
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
        shards, index = peers.shards, peers.index
        mine = batches[peers.replica * shards : (peers.replica + 1) * shards]
        #: Which tensors this rank owns.
        self.own = tuple(mine[index])
        self._numel = wholes[self.own[0]].numel if self.own else 0
        #: For each replica, this rank's pieces of what that owns.
        self.held = [
            _sent(wholes, batches[replica * shards : (replica + 1) * shards], index)
            for replica in range(peers.replicas)
        ]
        self._sizes = [sum(each.numel for each in held) for held in self.held]
        self._outgoing = [sum(wholes[each].size(index) for each in owned) for owned in mine]
        self._incoming = [sum(wholes[each].size(source) for each in self.own) for source in range(shards)]
        # Rows of own tensors and the ranges of their pieces, in the order of the memory that arrives.
        self._arrivals = [
            (row, *wholes[each].pieces[source])
            for source in range(shards)
            for row, each in enumerate(self.own)
            if wholes[each].size(source)
        ]

    @property
    def sends(self) -> Sequence[SentPiece]:
        return self.held[self._peers.replica]

    def outgoing(self) -> torch.Tensor:
        """Memory for what this rank sends, and gets back."""
        return self._empty(self._sizes[self._peers.replica])

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
        own = everyone[self._peers.replica]
        own[: outgoing.numel()].copy_(outgoing)
        return replicate.all_gather(everyone.view(-1), own)

    def wholes(self, incoming: torch.Tensor) -> torch.Tensor:
        """The whole tensors of this owner, ``[count, numel]`` in storage order, of what arrived."""
        found = self._empty(len(self.own) * self._numel).view(len(self.own), self._numel)
        _torch_private.foreach_copy_(self._parts(found), self._blocks(incoming))
        return found

    def pack(self, incoming: torch.Tensor, results: torch.Tensor) -> None:
        """Write ``results`` (``[count, numel]``, storage order) where they are brought back from."""
        _torch_private.foreach_copy_(self._blocks(incoming), self._parts(results))

    def _blocks(self, incoming: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.split(incoming, [stop - start for _, start, stop in self._arrivals]))

    def _parts(self, wholes: torch.Tensor) -> list[torch.Tensor]:
        return [wholes[row, start:stop] for row, start, stop in self._arrivals]

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
        if numel:
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
        """Start an exchange, behind what was computed so far.

        Returns a call that orders what is computed after it behind the exchange.
        """
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
