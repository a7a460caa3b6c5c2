"""Collectives between processes with one CUDA device each, over torch.distributed's NCCL."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError
from polyshard.interfaces import BufferRole, CollectivesCapabilities, PluginContext, ReduceOp, Work

from .groups import check_same_dtype, check_slices
from .process_group import (
    GROUP_DTYPES,
    ProcessGroupCollectives,
    as_bytes,
    flat_collective,
    receive_buffer,
    reduce_rows,
    torch_op,
)

_CAPABILITIES = CollectivesCapabilities(
    devices=frozenset({"cuda"}),
    dtypes=GROUP_DTYPES,
    reduce_ops=frozenset(ReduceOp),
    widening=True,
    stream_ordered=True,
    capturable=True,
    fixed_addresses=False,
    can_communicate=True,
)


class StreamWork:
    """Orders the waiting stream after the operation, which runs on the stream that issued it."""

    __slots__ = ("_event", "_stream")

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._event = self._stream.record_event()

    def wait(self) -> None:
        current = torch.cuda.current_stream()
        if current != self._stream:
            current.wait_event(self._event)


class NcclCollectives(ProcessGroupCollectives):
    """Ranks that are processes, with tensors on one CUDA device each.

    Operations run on the stream that is current when they are issued, so that memory which that stream allocated and
    frees needs no further care, and a captured graph needs no stream but the caller's. Gathers use the given group and
    reductions a second communicator: on one, they would wait for each other even on two streams. Where the group is a
    part of a job whose communicator is bound to a device, no second one can be made by its ranks alone, and both share
    the given one; ``partition`` of the whole job does not have that limit.

    A rank that never arrives is found by NCCL's own watchdog, after the process group's timeout.

    Args:
        context: its ``process_group``, or the default group, says which processes take part. Where that group uses
            another transport for CUDA, an NCCL group over the same ranks is made at the first operation.
        registered: allocate gather buffers in memory that is registered with NCCL, which takes fewer multiprocessors
            away from concurrent computation. The first ``allocation`` then meets the other ranks.

    Raises:
        StateError: ``torch.distributed`` is not initialised.
        DeviceError: the context's device is not CUDA.
        WorldSizeError: this process is not in the group.
        ConfigError: ``registered`` is not a bool.
    """

    transport = "nccl"
    device_type = "cuda"
    separate_reductions = True

    def __init__(self, context: PluginContext, registered: bool = False) -> None:
        if not isinstance(registered, bool):
            raise ConfigError(f"collectives {context.name!r}: registered is {registered!r}; give true or false")
        super().__init__(context)
        self._registered = registered

    def _enter(self, context: PluginContext, given: dist.ProcessGroup) -> None:
        super()._enter(context, given)
        self._reduce_scatter = flat_collective("reduce_scatter_single", "reduce_scatter_tensor")
        self._registered = False
        self._pool: torch.cuda.MemPool | None = None

    def _enter_part(self, whole: NcclCollectives, made: list[dist.ProcessGroup]) -> None:
        super()._enter_part(whole, made)
        self._registered = whole._registered

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return _CAPABILITIES

    def allocation(self, role: BufferRole) -> AbstractContextManager[Any]:
        if not self._registered or role is not BufferRole.GATHER:
            return nullcontext()
        if self._pool is None:
            self._pool = self._make_pool()
        return torch.cuda.use_mem_pool(self._pool)

    def _make_pool(self) -> torch.cuda.MemPool:
        # A pool can be registered only with a communicator that exists, and the first operation makes it. Memory that
        # the pool takes later is registered as it is taken.
        self.barrier()
        transport: Any = self.gather_group()._get_backend(self.device)
        pool = torch.cuda.MemPool(transport.mem_allocator)
        transport.register_mem_pool(pool)
        return pool

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        check_slices("all_gather", out, shard, self._rank, self._world_size)
        check_same_dtype("all_gather", out, shard, self._rank)
        return self._issue("all_gather", self._all_gather, self.gather_group(), as_bytes(out), as_bytes(shard))

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        *,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        scratch: torch.Tensor | None = None,
    ) -> Work:
        check_slices("reduce_scatter", full, out, self._rank, self._world_size)
        group = self.reduction_group()
        with torch.no_grad():
            if out.dtype is full.dtype:
                if prescale != 1.0:
                    full.mul_(prescale)
                self._run("reduce_scatter", self._reduce_scatter, group, out, full, op=torch_op(op))
                if postscale != 1.0:
                    out.mul_(postscale)
            else:
                # Narrow bytes travel and wide sums are taken on arrival: half of what a wide reduce-scatter sends, and
                # the same answer.
                received = receive_buffer(full, scratch)
                self._run("reduce_scatter", dist.all_to_all_single, group, as_bytes(received), as_bytes(full))
                reduce_rows(out, received.view(self._world_size, out.numel()), op, prescale, postscale)
        return StreamWork()

    def scratch_nbytes(self, role: BufferRole, numel: int, wire_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
        return 0 if wire_dtype is out_dtype else numel * wire_dtype.itemsize

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp, postscale: float = 1.0) -> Work:
        self._run("all_reduce", dist.all_reduce, self.reduction_group(), tensor, op=torch_op(op))
        if postscale != 1.0:
            with torch.no_grad():
                tensor.mul_(postscale)
        return StreamWork()

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        source = self._root_of(src)
        return self._issue("broadcast", dist.broadcast, self.gather_group(), as_bytes(tensor), src=source)

    def barrier(self) -> None:
        device = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self._run("barrier", dist.barrier, self.gather_group(), device_ids=[device])

    def _issue(
        self,
        operation: str,
        function: Callable[..., Any],
        group: dist.ProcessGroup,
        *tensors: torch.Tensor,
        **options: Any,
    ) -> Work:
        self._run(operation, function, group, *tensors, **options)
        return StreamWork()

    def _run(
        self,
        operation: str,
        function: Callable[..., Any],
        group: dist.ProcessGroup,
        *tensors: torch.Tensor,
        **options: Any,
    ) -> None:
        try:
            function(*tensors, group=group, async_op=False, **options)
        except RuntimeError as error:
            raise self._translated(error, operation) from error

    def close(self) -> None:
        self._pool = None
        super().close()
