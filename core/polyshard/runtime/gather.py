"""Gathers: what they are made from, and the functions that fill whole units with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from .. import _torch_private
from ..errors import PolyshardError
from ..interfaces import (
    COMPLETED,
    SLICE_ALIGNMENT_BYTES,
    BufferRole,
    Collectives,
    GatherEncoding,
    Observer,
    OffloadManager,
    PrecisionPlugin,
    UnitEvent,
    UnitOperation,
    UnitSpec,
    Work,
)
from ..interfaces.collectives import issued
from ..planning.groups import Route, UnitRanks
from .buffers import FlatBuffer, SecondaryShard, by_rank, columns_of, slices_of


class Source(NamedTuple):
    """What a gather is made from, and among whom."""

    group: Collectives | None
    """The ranks that share the unit, or neighbours among them; None where nothing is sent."""
    memory: torch.Tensor
    """This rank's shard (``[shard_numel]``, master dtype), where ``offload_manager`` has it if it is offloaded. Where
    ``group`` is of neighbours, its ``SecondaryShard``."""
    offload_manager: OffloadManager | None
    """It alone reads offloaded ``memory``; None where nothing is offloaded."""
    encoding: GatherEncoding | None
    """How the unit travels where its precision plugin encodes it; None for as its buffer is."""
    slices: Sequence[torch.Tensor]
    """The slices of ``memory``, one for each of ``owns``."""
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """What the gather fills, one a segment of the buffer, and this rank's slice of it."""
    owns: list[torch.Tensor]
    """These slices, shaped as ``slices``."""
    masters: Masters | None = None
    """What ``memory`` is made from before the gather, unless it is current; None where it is no copy."""


@dataclass(slots=True)
class Masters:
    """Masters of several ranks, of which a secondary shard is a copy in the dtype of compute."""

    route: Route
    part: SecondaryShard
    memory: torch.Tensor
    """This rank's master (``[shard_numel]``)."""
    offload_manager: OffloadManager | None
    current: bool = False
    """Whether ``part`` has the values of the masters."""

    def distribute(self, gathered: Gatherable) -> Work:
        """Start making ``part`` from the masters."""
        shard = torch.empty(self.memory.numel(), dtype=self.part.memory.dtype, device=self.part.memory.device)
        if self.offload_manager is not None:
            self.offload_manager.fetch(gathered.unit.spec, self.memory, shard)
        else:
            shard.copy_(self.memory)
        self.part.attach()
        return self.route.distribute(self.part.memory, shard)


class GatheredUnit(Protocol):
    """Of what the whole parameters are that are gathered."""

    spec: UnitSpec
    ranks: UnitRanks
    precision: PrecisionPlugin
    observers: tuple[Observer, ...]


class Gatherable(Protocol):
    """Whole parameters as gathers see them, which read this when they are issued."""

    @property
    def unit(self) -> GatheredUnit: ...

    places: list[object]
    """Where it was used since its gather, as ``CommStreams.here`` says."""
    source: Source

    @property
    def buffer(self) -> FlatBuffer:
        """They are gathered here (``[padded_numel]``, compute dtype)."""


def allocation_of(gathered: Gatherable) -> AbstractContextManager[Any]:
    """A context in which memory for the buffer is taken: its backend may have memory of its own for gathers."""
    return (gathered.source.group or gathered.unit.ranks.world).allocation(BufferRole.GATHER, gathered.buffer.nbytes)


def start_masters(units: Sequence[Gatherable]) -> Sequence[Work]:
    """Start making secondary shards anew that masters have left behind. Gathers of ``units`` follow the works."""
    stale = [(each, of) for each in units if (of := each.source.masters) is not None and not of.current]
    works: list[Work] = []
    try:
        for each, masters in stale:
            works.append(masters.distribute(each))
    except BaseException:
        wait_quietly(works)
        raise
    for _, masters in stale:
        masters.current = True
    return works


def start_gathers(units: Sequence[Gatherable]) -> Sequence[Work]:
    """Write the own slices into attached buffers, and start the gathers: one launch for each group of ranks,
    in the order in which the groups come up.

    ``end_gather`` follows for each unit, where operations are ordered behind the returned works.
    """
    if len(units) == 1:
        return (_start_one(units[0]),)
    # As ``alike`` does, without a call.
    together: dict[int, list[Gatherable]] = {}
    for each in units:
        together.setdefault(id(each.source.group), []).append(each)
    works: list[Work] = []
    try:
        for members in together.values():
            group = members[0].source.group
            if group is None:
                works += [_start_one(each) for each in members]
            else:
                works.append(_start_many(group, members))
    except BaseException:
        wait_quietly(works)
        raise
    return works


def wait_quietly(works: Iterable[Work]) -> None:
    """Let operations end that were issued with one that failed: they write into memory that is released next."""
    for work in works:
        with suppress(PolyshardError):
            work.wait()


def end_gather(gathered: Gatherable) -> None:
    """Call the observers: the gather ends at the present point of the current stream."""
    for observer in gathered.unit.observers:
        observer(UnitEvent(UnitOperation.GATHER, gathered.unit.spec, begins=False))


def _start_one(gathered: Gatherable) -> Work:
    source, buffer = gathered.source, gathered.buffer
    group = source.group
    if buffer.divided:
        return _start_many(group, (gathered,))
    for observer in gathered.unit.observers:
        observer(UnitEvent(UnitOperation.GATHER, gathered.unit.spec))
    if source.encoding is not None and group is not None:
        encoded = _EncodedGather(group, [gathered])
        return encoded.behind(issued(group.all_gather(*encoded.pairs[0]), "all_gather", group, gathered.unit.spec))
    own = source.owns[0]
    if source.offload_manager is not None:
        source.offload_manager.fetch(gathered.unit.spec, source.memory, own)
    else:
        # The cast is the copy-in: master dtype to compute dtype, straight into the slice that is sent.
        own.copy_(source.slices[0])
    if group is None:
        return COMPLETED
    return issued(group.all_gather(*source.pairs[0]), "all_gather", group, gathered.unit.spec)


def _start_many(group: Collectives | None, units: Sequence[Gatherable]) -> Work:
    for each in units:
        for observer in each.unit.observers:
            observer(UnitEvent(UnitOperation.GATHER, each.unit.spec))
    plain = [each for each in units if each.source.encoding is None]
    here = [each for each in plain if each.source.offload_manager is None]
    behind = [call for each in plain for call in each.buffer.behind]
    for each in plain:
        for stage in each.buffer.stages:
            stage.attach()
        if each.buffer.encode is not None:
            each.buffer.encode(_on_device(each))
    owns = [own for each in here for own in each.source.owns]
    if owns:
        # The cast is the copy-in, as for one, in one launch.
        _torch_private.foreach_copy_(owns, [own for each in here for own in each.source.slices])
    if len(here) < len(plain):
        for each in plain:
            if each.source.offload_manager is not None and each.buffer.encode is None:
                _fetch(each, each.source.offload_manager)
    pairs = [pair for each in plain for pair in each.source.pairs]
    spec = units[0].unit.spec if len(units) == 1 else None
    if group is None:
        # What is made of bytes is made so on one rank, too.
        gather = COMPLETED
    elif len(plain) == len(units):
        gather = issued(group.all_gather_many(pairs), "all_gather_many", group, spec)
    else:
        encoded = _EncodedGather(group, [each for each in units if each.source.encoding is not None])
        gather = encoded.behind(issued(group.all_gather_many(pairs + encoded.pairs), "all_gather_many", group, spec))
    return Then(behind, gather) if behind else gather


def _fetch(gathered: Gatherable, offload_manager: OffloadManager) -> None:
    memory, owns = gathered.source.memory, gathered.source.owns
    if not gathered.buffer.layout.segments:
        offload_manager.fetch(gathered.unit.spec, memory, owns[0])
        return
    # A manager writes the shard in one piece.
    shard = torch.empty(memory.numel(), dtype=gathered.buffer.dtype, device=gathered.unit.spec.device)
    offload_manager.fetch(gathered.unit.spec, memory, shard)
    _torch_private.foreach_copy_(owns, slices_of(shard, gathered.buffer.layout))


def _on_device(gathered: Gatherable) -> torch.Tensor:
    """The shard on the device that computes."""
    source = gathered.source
    if source.offload_manager is None:
        return source.memory
    shard = torch.empty(source.memory.numel(), dtype=source.memory.dtype, device=gathered.unit.spec.device)
    source.offload_manager.fetch(gathered.unit.spec, source.memory, shard)
    return shard


class _EncodedGather:
    """Units that travel as bytes of their precision plugins: own shards are encoded here, and ``pairs`` are to be
    gathered."""

    def __init__(self, group: Collectives, units: Sequence[Gatherable]) -> None:
        nbytes = [each.source.encoding.nbytes_per_rank for each in units if each.source.encoding is not None]
        sizes = [group.world_size * each for each in nbytes]
        ends = list(accumulate(-(-size // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES for size in sizes))
        # In one piece of memory: allocating many costs the host more than cutting one.
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=units[0].unit.spec.device)
        messages = [
            memory[start : start + size].view(group.world_size, -1)
            for start, size in zip([0, *ends], sizes, strict=False)
        ]
        owns = [message[group.rank] for message in messages]
        #: The bytes that each unit's gather fills, and this rank's part of them.
        self.pairs = [(message.view(-1), own) for message, own in zip(messages, owns, strict=True)]
        self._decodes: list[Callable[[], None]] = []
        for precision in {id(each.unit.precision): each.unit.precision for each in units}.values():
            mine = [index for index, each in enumerate(units) if each.unit.precision is precision]
            specs = [units[index].unit.spec for index in mine]
            precision.encode_many(specs, [owns[index] for index in mine], [_on_device(units[index]) for index in mine])
            buffers = [units[index].buffer for index in mine]
            self._decodes.append(partial(_decode, precision, specs, [messages[index] for index in mine], buffers))

    def behind(self, gather: Work) -> Work:
        """``gather``, of ``pairs`` and maybe others, and then the decoding."""
        return Then(self._decodes, gather)


def _decode(
    precision: PrecisionPlugin, specs: list[UnitSpec], messages: list[torch.Tensor], buffers: list[FlatBuffer]
) -> None:
    # A precision plugin writes one rank's elements after the other's, whatever segments they lie in.
    rows = [
        (torch.empty_like(buffer.flat) if buffer.layout.segments else buffer.flat).view(len(message), -1)
        for buffer, message in zip(buffers, messages, strict=True)
    ]
    precision.decode_many(specs, messages, rows)
    for buffer, row in zip(buffers, rows, strict=True):
        if buffer.layout.segments:
            _torch_private.foreach_copy_(by_rank(buffer.flat, buffer.layout), columns_of(row, buffer.layout))


@dataclass(slots=True)
class Then:
    """Waits for what was gathered, then does the rest once: decodes bytes, copies staged parameters."""

    rest: list[Callable[[], None]]
    gather: Work

    def wait(self) -> None:
        self.gather.wait()
        for each in self.rest:
            each()
        self.rest = []
