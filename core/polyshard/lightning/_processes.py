"""Processes that Lightning or a launcher started, one for each device, as a group of ``torch.distributed``."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from torch import nn

from ..api import close
from ..errors import ConfigError, PolyshardError

T = TypeVar("T")


class Processes:
    """What Fabric's strategy and the Trainer's have in common beside their bases, which give ranks and devices."""

    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int

    def __init__(self, process_group_backend: str | None, timeout_s: float) -> None:
        self._num_nodes = 1
        self._timeout = timedelta(seconds=timeout_s)
        self._process_group_backend = process_group_backend
        #: Modules that were sharded here and are in use.
        self._live: WeakSet[nn.Module] = WeakSet()

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Hosts of the job."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes of this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every rank has data of its own."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str:
        """What Lightning's own messages go through; gradients and parameters go through ``ShardConfig.collectives``."""
        return self._process_group_backend or dist.get_default_backend_for_device(self.root_device)

    def set_world_ranks(self) -> None:
        """Tell the environment, and Lightning's functions of rank 0, which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def join(self) -> None:
        """Form the process group, unless the program has one.

        Raises:
            ConfigError: it has one of another size.
        """
        reset_seed()
        self.set_world_ranks()
        if not dist.is_initialized():
            environment = self.cluster_environment
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            device = self.root_device
            dist.init_process_group(
                self.process_group_backend,
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self._timeout,
                device_id=device if device.type != "cpu" else None,
            )
            atexit.register(_leave, self._live)
        elif dist.get_world_size() != self.world_size:
            raise ConfigError(
                f"torch.distributed has {dist.get_world_size()} ranks, and Lightning was asked for {self.num_nodes} "
                f"nodes of {self.num_processes} devices (rank {self.global_rank}). Set devices and num_nodes to what "
                "the launcher started."
            )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s ``obj``, on every rank."""
        if not dist.is_initialized():
            return obj
        sent = [obj]
        dist.broadcast_object_list(sent, src)
        return sent[0]

    def reduced(self, value: Any, group: Any | None, operation: Any | None) -> Any:
        """``value`` reduced over ``group``, in place, where it is a tensor; anything else as it is.

        Args:
            value: A tensor of any shape and dtype.
            group: A process group; None for all ranks.
            operation: A ``ReduceOp``, or its name; ``"mean"`` and ``"avg"`` for the mean, None for the sum.
        """
        if not isinstance(value, torch.Tensor) or not dist.is_initialized():
            return value
        group = dist.group.WORLD if group is None else group
        averages = isinstance(operation, str) and operation.lower() in ("mean", "avg")
        if isinstance(operation, str) and not averages:
            operation = getattr(dist.ReduceOp, operation.upper())
        dist.all_reduce(value, op=dist.ReduceOp.SUM if averages or operation is None else operation, group=group)
        if averages:
            # Not every backend has a mean, and none has one of integers.
            value.copy_(value / dist.get_world_size(group))
        return value


def _leave(live: WeakSet[nn.Module]) -> None:
    """End what would outlive the interpreter: communicators of models, then the group that they were made of."""
    # After an error other ranks may not come, and there is nothing to wait for.
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    for module in list(live):
        with suppress(PolyshardError):
            close(module)
    dist.destroy_process_group()
