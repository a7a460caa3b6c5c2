"""Gathers whose bytes are not the parameters in compute dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from ...interfaces import SLICE_ALIGNMENT_BYTES, Collectives, PrecisionCaster, UnitSpec, Work
from ..planning.answers import issued


@dataclass(frozen=True, slots=True)
class EncodedGather:
    """How one unit travels: the bytes of each rank, and the caster that writes them."""

    nbytes_per_rank: int
    caster: PrecisionCaster

    def start(self, spec: UnitSpec, shard: Collectives, source: torch.Tensor, out: torch.Tensor) -> Work:
        """Issue the gather of ``source`` (``[shard_numel]``); its ``wait`` decodes into ``out`` (``[numel]``)."""
        encoded = EncodedUnits(shard, [EncodedUnit(self, spec, source, out)])
        work = shard.all_gather(*encoded.pairs[0])
        return encoded.behind(issued(work, "all_gather", shard, spec.label))


class EncodedUnit(NamedTuple):
    """A unit that is about to travel."""

    gather: EncodedGather
    spec: UnitSpec
    """What its caster is told of it."""
    source: torch.Tensor
    """Its own shard, ``[shard_numel]`` in the master's dtype, on the device."""
    out: torch.Tensor
    """Its gather buffer, ``[numel]``."""


class EncodedUnits:
    """Units that travel together: their own shards are encoded when this is made, and ``pairs`` are to be gathered."""

    def __init__(self, shard: Collectives, units: Sequence[EncodedUnit]) -> None:
        sizes = [shard.world_size * unit.gather.nbytes_per_rank for unit in units]
        ends = list(accumulate(-(-size // SLICE_ALIGNMENT_BYTES) * SLICE_ALIGNMENT_BYTES for size in sizes))
        # In one piece of memory: allocating many costs the host more than cutting one.
        memory = torch.empty(ends[-1], dtype=torch.uint8, device=units[0].out.device)
        wires = [
            memory[start : start + size].view(shard.world_size, -1)
            for start, size in zip([0, *ends], sizes, strict=False)
        ]
        owns = [wire[shard.rank] for wire in wires]
        #: What each unit's gather fills, and its own part of that.
        self.pairs = [(wire.view(-1), own) for wire, own in zip(wires, owns, strict=True)]
        self._decodes: list[_Decode] = []
        for caster in {id(unit.gather.caster): unit.gather.caster for unit in units}.values():
            mine = [index for index, unit in enumerate(units) if unit.gather.caster is caster]
            specs = [units[index].spec for index in mine]
            caster.encode_many(specs, [owns[index] for index in mine], [units[index].source for index in mine])
            outs = [units[index].out.view(shard.world_size, -1) for index in mine]
            self._decodes.append(_Decode(caster, specs, [wires[index] for index in mine], outs))

    def behind(self, gather: Work) -> Work:
        """``gather``, of ``pairs`` and maybe others, and then the decoding."""
        return _Decoding(self._decodes, gather)


class _Decode(NamedTuple):
    caster: PrecisionCaster
    specs: Sequence[UnitSpec]
    wires: Sequence[torch.Tensor]
    outs: Sequence[torch.Tensor]


@dataclass(slots=True)
class _Decoding:
    """Waits for the bytes, then decodes them once."""

    decodes: list[_Decode]
    gather: Work

    def wait(self) -> None:
        self.gather.wait()
        for decode in self.decodes:
            decode.caster.decode_many(decode.specs, decode.wires, decode.outs)
        self.decodes = []
