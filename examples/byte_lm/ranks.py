"""Which rank this process is, where it computes, and how ranks average what they report."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError
from settings import Settings, plugin_name

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    """Where this rank computes."""
    communicates: bool
    """False where the other ranks are pretended."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports and writes."""
        return self.rank == 0

    def average(self, values: Sequence[torch.Tensor]) -> list[float]:
        """The mean over ranks of each 0-dim tensor."""
        stacked = torch.stack([value.detach() for value in values]).to(torch.float64)
        if self.communicates:
            # Gloo has no mean.
            dist.all_reduce(stacked)
            stacked /= self.world_size
        averages: list[float] = stacked.tolist()
        return averages

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest over ranks of each value."""
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.communicates:
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
        largest: list[float] = together.tolist()
        return largest

    def from_first(self, value: T) -> T:
        """Rank 0's ``value``, on every rank."""
        box = [value]
        if self.communicates:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]


@contextmanager
def join_ranks(settings: Settings) -> Iterator[Ranks]:
    """Inside, this process is one of the job's ranks: torchrun's, or a pretended one.

    Raises ``ConfigError`` where torchrun did not start it, or started more ranks on this host than it has GPUs.
    """
    if settings.pretends:
        options = settings.shard.collectives
        assert isinstance(options, Mapping)
        device = settings.shard.device or torch.device("cpu")
        yield Ranks(int(options.get("rank", 0)), int(options["world_size"]), device, communicates=False)
        return
    if not os.environ.get("RANK"):
        raise ConfigError(
            "this process is no rank of a job. Launch it with\n"
            "  torchrun --standalone --nproc-per-node 2 examples/byte_lm/train.py --config examples/byte_lm/run.toml\n"
            "or set POLYSHARD_COLLECTIVES=fake for one pretended rank."
        )
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = _device(settings, local_rank, ranks_here)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # More threads than cores slow each other down; torchrun's own default of one wastes cores.
        torch.set_num_threads(max(1, _cores() // ranks_here))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=settings.shard.timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, communicates=True)
    finally:
        # A model is full of cycles, and holds the group: its threads would outlive the interpreter, and a thread that
        # then wants the interpreter's lock aborts the process.
        gc.collect()
        dist.destroy_process_group()


def _device(settings: Settings, local_rank: int, ranks_here: int) -> torch.device:
    if settings.shard.device is not None and settings.shard.device.type != "cuda":
        return settings.shard.device
    if plugin_name(settings.shard.collectives) == "gloo" or not torch.cuda.is_available():
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
