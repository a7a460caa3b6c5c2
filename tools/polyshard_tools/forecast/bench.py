"""Links, measured: gathers and reductions of several sizes through the collectives that will be used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import BufferRole, Collectives, ReduceOp
from polyshard.io.progress import report_progress

from .recording import Operation
from .timing import Link, LinkModel, fitted

#: Bytes of the whole buffers that are timed by default: 1 MiB to 256 MiB.
SIZES = tuple(2**exponent for exponent in (20, 22, 24, 26, 28))
ROUNDS = 10
#: Operations before the timed ones: communicators and connections are made by the first.
_WARMUP = 2
#: Elements at whose multiples slices begin, as units' do.
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Timing:
    operation: Operation
    ranks: int
    nbytes: int
    """Of the whole buffer."""
    seconds: float
    """Median over rounds of the slowest rank's time."""


def bench(collectives: Collectives, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS) -> list[Timing]:
    """Time gathers and reductions of ``sizes`` bytes among the ranks of ``collectives``; every rank calls it.

    bf16 travels, as units do, and is added up in fp32 where the collectives can. How many operations are issued follows
    from the arguments alone, never from how long one took.

    Returns the same on every rank.
    Raises ConfigError: there is one rank, fewer than two sizes, or no round.
    """
    ranks = collectives.world_size
    if ranks < 2:
        raise ConfigError("One rank has no links. Start more of them with torchrun.")
    if len(set(sizes)) < 2 or min(sizes) < ranks * _ALIGNMENT * 2 or rounds < 1:
        raise ConfigError(
            f"sizes are {list(sizes)} and rounds {rounds}: give two sizes or more, each of at least "
            f"{ranks * _ALIGNMENT * 2} bytes for {ranks} ranks, and one round or more."
        )
    timings: list[Timing] = []
    operations = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
    for nbytes in sizes:
        shard = nbytes // 2 // ranks // _ALIGNMENT * _ALIGNMENT
        for operation in operations:
            report_progress(len(timings), len(sizes) * len(operations))
            mine = _Timed(collectives, operation, shard).times(rounds)
            everyone = collectives.all_gather_object(mine)
            slowest = [max(times) for times in zip(*everyone, strict=True)]
            timings.append(Timing(operation, ranks, shard * ranks * 2, statistics.median(slowest)))
    return timings


def links_of(timings: Sequence[Timing]) -> tuple[Link, ...]:
    """The link of each operation and number of ranks, fitted to ``timings``."""
    keys = dict.fromkeys((each.operation, each.ranks) for each in timings)
    return tuple(
        fitted(*key, [(each.nbytes, each.seconds) for each in timings if (each.operation, each.ranks) == key])
        for key in keys
    )


def bench_machine(
    collectives: Collectives, ranks_per_host: int, name: str, source: str, sizes: Sequence[int], rounds: int
) -> LinkModel:
    """The links inside a host, among 2, 4, … and all of its ranks, and those between hosts; every rank calls it.

    ``ranks_per_host``: how many neighbouring ranks share a host.
    """
    world = collectives.world_size
    inside: list[Timing] = []
    host = min(ranks_per_host, world)
    if world % host:
        raise ConfigError(f"{world} ranks are no multiple of the {host} of a host. Start as many on each.")
    size = 2
    while size < host:
        if host % size == 0:
            inside += _of_part(collectives, size, sizes, rounds)
        size *= 2
    between: list[Timing] = []
    if host > 1:
        inside += _of_part(collectives, host, sizes, rounds)
    if host < world:
        between = bench(collectives, sizes, rounds)
    return LinkModel(name, source, ranks_per_host, links_of(inside), links_of(between))


def _of_part(collectives: Collectives, size: int, sizes: Sequence[int], rounds: int) -> list[Timing]:
    """Of groups of ``size`` neighbours, all at once, as sharding has them; the first group's count."""
    world = collectives.world_size
    if size == world:
        return bench(collectives, sizes, rounds)
    part = collectives.partition([list(range(first, first + size)) for first in range(0, world, size)])
    try:
        timings = bench(part, sizes, rounds)
    finally:
        part.close()
    first: list[Timing] = collectives.all_gather_object(timings)[0]
    return first


class _Timed:
    def __init__(self, collectives: Collectives, operation: Operation, shard: int) -> None:
        self._collectives = collectives
        self._operation = operation
        device, capabilities = collectives.device, collectives.capabilities
        travels = torch.bfloat16 if torch.bfloat16 in capabilities.dtypes else torch.float16
        role = BufferRole.GATHER if operation is Operation.ALL_GATHER else BufferRole.REDUCE
        with collectives.allocation(role, shard * collectives.world_size * travels.itemsize):
            self._whole = torch.zeros(shard * collectives.world_size, dtype=travels, device=device)
        self._shard = self._whole.narrow(0, collectives.rank * shard, shard)
        self._result = torch.zeros(shard, dtype=torch.float32 if capabilities.widening else travels, device=device)
        nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, self._whole.numel(), travels, self._result.dtype)
        self._scratch = torch.zeros(nbytes, dtype=torch.uint8, device=device) if nbytes else None

    def times(self, rounds: int) -> list[float]:
        for _ in range(_WARMUP):
            self._run()
        return [self._time() for _ in range(rounds)]

    def _run(self) -> None:
        if self._operation is Operation.ALL_GATHER:
            self._collectives.all_gather(self._whole, self._shard).wait()
        else:
            self._collectives.reduce_scatter(self._result, self._whole, op=ReduceOp.MEAN, scratch=self._scratch).wait()

    def _time(self) -> float:
        device = self._collectives.device
        on_device = device.type == "cuda" and self._collectives.capabilities.stream_ordered
        if on_device:
            torch.cuda.synchronize(device)
        self._collectives.barrier()
        if not on_device:
            began = time.perf_counter()
            self._run()
            return time.perf_counter() - began
        # The first lines the devices up: ranks leave a barrier at different times.
        self._run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._run()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3
