"""One round's way from pieces to whole tensors and back: what this rank sends to whom, and where it lies.

[Note: one round]
Each rank has a piece of each tensor, or none. Some tensors are brought together at one *owner* each, which computes
something of the same shape; every rank gets back the part of that which belongs to its piece::

    pieces ── pack ──► outgoing ── all_to_all ──► incoming ──► wholes ── transform ──► results
    pieces ◄── update ── everyone ◄── all_gather ◄── outgoing ◄── all_to_all ◄── incoming ◄──┘

Blocks of ``outgoing`` are by owner, those of ``incoming`` by the rank that they are from; both serve both ways. Where
other groups hold the same shards (hybrid strategies), each group owns a part of the tensors, and what became of this
rank's pieces goes to the ranks that hold the same ones in an ``all_gather``. Without shards that is all there is to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _torch_private
from ..interfaces import COMPLETED, Collectives, Work


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that hold the pieces of a tensor."""

    shard: Collectives | None
    """Those that hold different pieces; None where this one holds the whole."""
    replicate: Collectives | None
    """Those that hold the same piece; None where there is no other."""

    @property
    def shards(self) -> int:
        """Number of pieces."""
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
        """This rank's piece."""
        return 0 if self.shard is None else self.shard.rank


@dataclass(frozen=True, slots=True)
class Cut:
    """How the ranks cut one tensor."""

    numel: int
    """Elements of the whole tensor."""
    pieces: tuple[tuple[int, int], ...]
    """For each shard the range of elements, in storage order, that it holds: ``(start, stop)``; ``(0, 0)`` for none."""

    def size(self, shard: int) -> int:
        """Elements of one piece."""
        start, stop = self.pieces[shard]
        return stop - start


@dataclass(frozen=True, slots=True)
class Held:
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
        cuts: of each tensor.
        batches: for each owner, which of ``cuts`` it owns in this round, all of one size; owner
            ``replica * shards + shard``.
        peers: the ranks that hold them.
        dtype: in which they travel, and are computed with.
        device: where they travel, and are computed with.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
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
        self._numel = cuts[self.own[0]].numel if self.own else 0
        #: For each replica, this rank's pieces of what that owns.
        self.held = [
            _held(cuts, batches[replica * shards : (replica + 1) * shards], index) for replica in range(peers.replicas)
        ]
        self._sizes = [sum(each.numel for each in held) for held in self.held]
        self._outgoing = [sum(cuts[each].size(index) for each in owned) for owned in mine]
        self._incoming = [sum(cuts[each].size(source) for each in self.own) for source in range(shards)]
        # Whose piece of which own tensor, in the order in which they lie in what comes in.
        self._arrivals = [
            (row, *cuts[each].pieces[source])
            for source in range(shards)
            for row, each in enumerate(self.own)
            if cuts[each].size(source)
        ]

    @property
    def sends(self) -> Sequence[Held]:
        """The pieces that this rank sends."""
        return self.held[self._peers.replica]

    def outgoing(self) -> torch.Tensor:
        """Memory for what this rank sends, and gets back."""
        return self._empty(self._sizes[self._peers.replica])

    def incoming(self, outgoing: torch.Tensor) -> torch.Tensor:
        """Memory for what this rank receives, and sends back: ``outgoing`` itself where nothing is cut."""
        return outgoing if self._peers.shard is None else self._empty(sum(self._incoming))

    def everyone(self, outgoing: torch.Tensor) -> torch.Tensor:
        """Memory for what became of this rank's pieces, a row for each replica: ``outgoing`` where there is one."""
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
        """By tensor, what became of this rank's piece: 1-D, in storage order."""
        return {
            each.index: row.narrow(0, each.offset, each.numel)
            for row, held in zip(everyone, self.held, strict=True)
            for each in held
        }


def _held(cuts: Sequence[Cut], owners: Sequence[Sequence[int]], shard: int) -> tuple[Held, ...]:
    found, cursor = [], 0
    for owned in owners:
        for index in owned:
            numel = cuts[index].size(shard)
            if numel:
                found.append(Held(index, cursor, numel))
                cursor += numel
    return tuple(found)
