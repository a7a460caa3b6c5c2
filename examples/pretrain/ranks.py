"""Which rank this process is, where it computes, and what ranks tell each other beside gradients."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import polyshard
import torch
import torch.distributed as dist
from polyshard.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the others of torchrun's job."""

    rank: int
    world_size: int
    device: torch.device
    """Where this rank computes."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports and writes."""
        return self.rank == 0

    def total(self, values: Sequence[torch.Tensor | float]) -> list[float]:
        """The sum over ranks of each value, 0-dim tensors or numbers, in fp64."""
        stacked = torch.stack([torch.as_tensor(each).detach().to(self.device, torch.float64) for each in values])
        dist.all_reduce(stacked)
        totals: list[float] = stacked.tolist()
        return totals

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over ranks of each value."""
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        largest: list[float] = together.tolist()
        return largest

    def each(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank, on every rank."""
        box: list[T | None] = [None] * self.world_size
        dist.all_gather_object(box, value)
        return [each for each in box if each is not None]

    def from_first(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on rank 0, on every rank; a ``ConfigError`` that it raises there is raised on all."""
        box: list[tuple[T | None, str | None]] = [(None, None)]
        if self.is_first:
            try:
                box = [(action(), None)]
            except ConfigError as error:
                box = [(None, str(error))]
        dist.broadcast_object_list(box, src=0, device=self.device)
        value, failure = box[0]
        if failure is not None:
            raise ConfigError(failure)
        return value  # type: ignore[return-value]


@contextmanager
def join_ranks(shard: polyshard.ShardConfig) -> Iterator[Ranks]:
    """Inside, this process is one of torchrun's ranks, on a GPU of its own where there are any.

    Raises ``ConfigError`` where torchrun did not start it, or started more ranks on this host than it has GPUs.
    """
    if not os.environ.get("RANK"):
        raise ConfigError(
            "this process is no rank of a job. Launch it with\n"
            "  torchrun --standalone --nproc-per-node 2 examples/pretrain/train.py "
            "--config examples/pretrain/llama_toy.toml\n"
            "or give --dry-run RANKS to check the settings without one."
        )
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = _device(shard, local_rank, ranks_here)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # More threads than cores slow each other down; torchrun's own default of one wastes cores.
        torch.set_num_threads(max(1, _cores() // ranks_here))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=shard.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        # A model is full of cycles, and holds the group, whose threads would outlive the interpreter.
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def pretend_ranks(world_size: int) -> Iterator[None]:
    """Inside, this process is the first of so many ranks, of which it is the only one: nothing travels."""
    # Torch's own stand-in, which its tests have; importing it makes it known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device(shard: polyshard.ShardConfig, local_rank: int, ranks_here: int) -> torch.device:
    if shard.device is not None and shard.device.type != "cuda":
        return shard.device
    if shard.collectives == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks_here > torch.cuda.device_count():
        raise ConfigError(
            f"{ranks_here} ranks were started on a host with {torch.cuda.device_count()} GPU(s) (rank "
            f"{os.environ['RANK']}). Start one rank per GPU, or set POLYSHARD_COLLECTIVES=gloo to compute on the CPU."
        )
    return torch.device("cuda", local_rank)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
