"""Real ranks for the tests of a plugin: threads of this process, or processes of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from .. import registry
from ..config import PluginChoice
from ..errors import ConfigError
from ..interfaces import Group
from .rank_processes import Joined, RankProcesses

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: What stands for ``torch.distributed`` in a configuration, whatever else is installed.
_DISTRIBUTED = "polyshard:auto"
_THREADED = "polyshard:threaded"
#: What a rank may wait for another, in multiples of what the run may take: so that the run's end finds it waiting, and
#: shows where.
_WAITING = 2.0


@dataclass(frozen=True)
class Rank:
    """What a function that ``run_ranks`` calls is told of where it runs."""

    rank: int
    """This rank, in ``range(world_size)``."""
    world_size: int
    """Number of ranks."""
    collectives: PluginChoice
    """For ``ShardConfig(collectives=...)``, and for ``context.construct``: what exchanges between these ranks."""
    device: torch.device
    """Where this rank computes."""
    lock: AbstractContextManager[Any]
    """To be held around what belongs to the process, such as ``torch.manual_seed`` and the making of a model: ranks
    that are threads share it. Where ranks are processes it does nothing."""


class _World(Protocol):
    lock: AbstractContextManager[Any]

    def run(self, fn: Callable[[int, Any], T_co], *, timeout: float) -> list[T_co]: ...


def run_ranks(
    world_size: int,
    fn: Callable[[Rank], T],
    *,
    backend: Literal["threads", "processes"] = "threads",
    timeout_s: float = 60.0,
    device_type: Literal["cpu", "cuda"] = "cpu",
) -> list[T]:
    """Call ``fn`` once on each of ``world_size`` ranks, all at the same time; return the results in rank order.

    ``"threads"`` take no time to start, and ``fn`` may be any function. ``"processes"`` are new ones for each call,
    which join a group of ``torch.distributed`` first: ``fn``, its arguments and its results are pickled, so that it is
    a function of a module, or a ``functools.partial`` of one. ``RankProcesses`` runs many functions in processes that
    were started once.

    Where a rank raises, all others are ended, and what it raised is raised here, with a note that names the rank and
    holds its traceback. Of several that raised, the first counts that did not merely miss another.

    Args:
        world_size: number of ranks, at least 1.
        fn: called with the ``Rank``.
        backend: what ranks are.
        timeout_s: seconds until all ranks must have returned; starting processes does not count.
        device_type: ``"cuda"`` gives each process a device of its own, and its group NCCL beside gloo.

    Raises:
        ConfigError: ``fn`` cannot be pickled; a backend or device that does not exist; ``timeout_s`` is not positive.
        WorldSizeError: ``world_size`` is below 1, or there are fewer CUDA devices.
        CollectiveTimeoutError: ranks had not returned in time; the message has the stacks of all.
        RankFailedError: a process died, or what it returned or raised could not be pickled.
    """
    if timeout_s <= 0:
        raise ConfigError(f"ranks cannot end within {timeout_s:g} seconds; give a positive timeout_s")
    if backend == "threads":
        if device_type != "cpu":
            raise ConfigError(f'ranks that are threads compute on the CPU, not on {device_type}; take "processes"')
        return run_threads(world_size, fn, timeout_s)
    if backend != "processes":
        raise ConfigError(f'ranks are "threads" or "processes", not {backend!r}')
    with RankProcesses(world_size, device_type=device_type) as processes:
        return run_in(processes, fn, timeout_s=timeout_s)


def run_in(processes: RankProcesses, fn: Callable[[Rank], T], *, timeout_s: float = 60.0) -> list[T]:
    """What ``run_ranks`` does, in processes that stay for the next call."""
    return processes.run(_Called(fn), timeout_s=timeout_s)


@functools.cache
def _threaded() -> Any:
    # polyshard's own names stay what they are; reading what is installed takes longer than many a run.
    return registry.resolve(Group.COLLECTIVES, _THREADED).factory


def run_threads(
    world_size: int, fn: Callable[[Rank], T], timeout_s: float, collectives: str = _THREADED, factory: Any = None
) -> list[T]:
    """What ``run_ranks`` does, in threads that meet in a world which ``factory.make_world`` makes.

    ``collectives`` is the name of ``factory``; by default, both are polyshard's own.
    """
    world: _World = (factory or _threaded()).make_world(world_size, timeout_s * _WAITING)

    def on_rank(rank: int, world: Any) -> T:
        chosen = {"name": collectives, "world": world, "rank": rank}
        return fn(Rank(rank, world_size, chosen, torch.device("cpu"), world.lock))

    return world.run(on_rank, timeout=timeout_s)


@dataclass(frozen=True)
class _Called:
    """Calls ``fn`` in a process; can be pickled where ``fn`` can."""

    fn: Callable[[Rank], Any]

    def __call__(self, joined: Joined) -> Any:
        return self.fn(Rank(joined.rank, joined.world_size, _DISTRIBUTED, joined.device, joined.lock))
