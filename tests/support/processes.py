"""Ranks that are real processes, for tests: started together, timed, and always stopped."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from gpu_ranks import settle_on_device, share_device
from polyshard.testing import Rank, RankProcesses
from polyshard.testing.ranks import answer_calls, prepared, process_rank, store_in
from seeding import seed_all

T = TypeVar("T")

#: Seconds for a process to import torch and join the group.
_STARTUP = 90.0
#: What a fork server imports once, and each rank would take seconds for. A rank forked from it finds them there.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "polyshard_backends.gloo",
    "polyshard_fsdp",
    "polyshard_fsdp2",
    "hypothesis",
    "pytest",
    "transformers.trainer",
    "lightning",
)


def forking_context() -> Any:
    """Starts processes as forks of a server that has imported torch, and never used CUDA."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class _NcclProcesses(RankProcesses):
    """Ranks whose group is NCCL's alone, and bound to their device, as programs that train have it."""

    def _process(self, rank: int, device_type: str, folder: str, connection: Connection) -> Any:
        # CUDA can't be used in a process forked from one that has used it, and a preloaded module may.
        context = torch.multiprocessing.get_context("spawn")
        arguments = (rank, self.world_size, folder, dict(os.environ), connection)
        return context.Process(target=_serve_nccl, args=arguments, daemon=True)


def _serve_nccl(rank: int, world_size: int, folder: str, environ: dict[str, str], connection: Connection) -> None:
    with prepared(rank, folder, environ):
        device = settle_on_device(rank)
        dist.init_process_group(
            "nccl",
            init_method=store_in(folder),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_STARTUP),
            device_id=device,
        )
        answer_calls(process_rank(rank, world_size, device), connection)
        dist.destroy_process_group()


def _alike(target: Callable[..., T], args: tuple[Any, ...], joined: Rank) -> T:
    warnings.simplefilter("error")
    # What ran here before may have seeded each rank differently.
    seed_all(0)
    return target(joined.rank, *args)


class RankPool:
    """``RankProcesses`` in which warnings are errors, and every call begins with the same seed on all ranks.

    After a failure the pool is closed: a rank may hang in the middle of something.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._ranks: RankProcesses
        with _one_thread_each():
            if backend == "nccl":
                # Where ranks share a device, as many as there are devices is no limit.
                self._ranks = _NcclProcesses(world_size, device_type="cpu" if share_device() else "cuda")
                return
            # Before the ranks, which want less preloaded: the server is started once.
            forking_context()
            multiprocessing.forkserver.ensure_running()
            self._ranks = RankProcesses(world_size)

    @property
    def closed(self) -> bool:
        """Whether its processes have ended."""
        return self._ranks.closed

    def run(self, target: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Call ``target(rank, *args)`` on every rank; return the results in rank order.

        ``target`` is a function of a module. Raises as ``RankProcesses.run``.
        """
        return self._ranks.run(partial(_alike, target, args), timeout_s=timeout)

    def close(self) -> None:
        """Let every process leave, and stop those that do not."""
        self._ranks.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class KeptRanks:
    """Pools that the tests of a module share, by number of ranks; to be closed behind them.

    A pool is made at first use, and anew where a failure has closed it.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, target: Callable[..., T], *args: Any, timeout: float = 90.0) -> list[T]:
        """``RankPool.run`` of ``world_size`` ranks."""
        pool = self._pools.get(world_size)
        if pool is None or pool.closed:
            pool = self._pools[world_size] = RankPool(world_size, self._backend)
        return pool.run(target, *args, timeout=timeout)

    def close(self) -> None:
        """Let every process leave."""
        while self._pools:
            self._pools.popitem()[1].close()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def run_processes(
    world_size: int, target: Callable[..., T], *args: Any, timeout: float = 60.0, backend: str = "gloo"
) -> list[T]:
    """Call ``target(rank, *args)`` once in ``world_size`` new processes of one group; return the results in rank order.

    ``target`` is a function of a module; ``torch.distributed`` is initialised when it is called. Raises as
    ``RankPool.run``.
    """
    with RankPool(world_size, backend) as pool:
        return pool.run(target, *args, timeout=timeout)
