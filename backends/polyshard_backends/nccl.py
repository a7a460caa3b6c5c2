"""Collectives between processes with one CUDA device each, over torch.distributed's NCCL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, warn_once
from polyshard.interfaces import BufferRole, CollectivesCapabilities, PluginContext, ReduceOp, Work
from typing_extensions import override

from . import _torch_private
from .process_group import ProcessGroupCollectives, SharedGroups
from .row_mean import mean_of_rows
from .tensors import (
    GROUP_DTYPES,
    carried_blocks,
    check_blocks,
    check_gather,
    check_gathers,
    check_slices,
    dtype_of,
    receive_buffer,
    reduce_rows,
)

MIB = 2**20
#: MiB of a whole unit from which on its gather buffer is registered with NCCL: gathers of 4 MiB are no faster so, those
#: of 69 MiB by a quarter on two GPUs (benchmarks/figures.md, "Gathers and reductions alone").
SMALLEST_REGISTERED_MIB = 16
#: Results of fewer elements are summed by torch: starting the kernel would cost the host more than it saves the device.
LONG_ROW = 1 << 22

#: Answer of ``allocation`` for memory of the usual pool.
_USUAL_MEMORY: AbstractContextManager[Any] = nullcontext()

#: Errors of ``torch.distributed`` for arguments that do not fit, and for a transport that failed.
_FAILURES = (RuntimeError, TypeError, ValueError)

_CAPABILITIES = CollectivesCapabilities(
    devices=frozenset({"cuda"}),
    dtypes=GROUP_DTYPES,
    reduce_ops=frozenset(ReduceOp),
    widening=True,
    stream_ordered=True,
    capturable=True,
    fixed_addresses=False,
    can_communicate=True,
    exchanges=True,
)

_HALVES = (torch.bfloat16, torch.float16)


def check_mib(context: PluginContext, option: str, value: object) -> None:
    """Raise ``ConfigError`` where ``value`` is not a number of MiB."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"collectives {context.name!r}: {option} is {value!r}; give an integer, 0 or more")


class StreamWork:
    """Orders the waiting stream after the stream that issued the operation, where these differ.

    After all that the issuing stream was given before the wait, which may be more than the operation; but no event is
    recorded for waits that never come. ``device_index``: the CUDA device of the operation; None for the current one.
    """

    __slots__ = ("_issued_on",)

    def __init__(self, device_index: int | None = None) -> None:
        index = torch.cuda.current_device() if device_index is None else device_index
        self._issued_on = _torch_private.current_stream(index)

    def wait(self) -> None:
        issued_on = self._issued_on
        waiting = _torch_private.current_stream(issued_on[1])
        if waiting != issued_on:
            _torch_private.stream_of(waiting).wait_stream(_torch_private.stream_of(issued_on))


class NcclCollectives(ProcessGroupCollectives):
    """Ranks that are processes, with tensors on one CUDA device each.

    Operations run on the stream that is current when they are issued, so that memory of that stream needs no further
    care, and a captured graph needs no other stream. Gathers use the given group and reductions a second communicator:
    on one, they would wait for each other even on two streams. Where the group is a part of a job that is bound to
    devices (``init_process_group(device_id=...)``), its ranks split its own communicator for that, without the others;
    where that one cannot be split, both share it, with a warning.

    Exchanges use the reductions' communicator: they carry results of reductions and come behind these anyway, while
    gathers of the next forward overlap with them, and a third communicator would hold its connections once more.

    A rank that never arrives is found by NCCL's own watchdog, after the process group's timeout.

    Args:
        context: its ``process_group``, or the default group, says which processes take part. Where that group uses
            another transport for CUDA, an NCCL group over the same ranks is made at the first operation.
        registered: allocate large gather buffers in memory that is registered with NCCL, which copies once less and
            takes less from concurrent computation. The first such ``allocation`` meets the other ranks. Plain memory,
            with a warning, where this NCCL cannot register.
        communicators: 2, or 1 to let gathers and reductions share one, which saves its memory and start-up time.
        smallest_mib: MiB of a whole unit from which on its gather buffer is a large one.

    Raises:
        StateError: ``torch.distributed`` is not initialised.
        DeviceError: the context's device is not CUDA.
        WorldSizeError: this process is not in the group.
        ConfigError: ``registered`` is not a bool, ``communicators`` neither 1 nor 2, or ``smallest_mib`` no size.
    """

    api_version = 1
    capabilities = _CAPABILITIES

    transport = "nccl"
    device_type = "cuda"

    def __init__(
        self,
        context: PluginContext,
        registered: bool = True,
        communicators: int = 2,
        smallest_mib: int = SMALLEST_REGISTERED_MIB,
    ) -> None:
        if not isinstance(registered, bool):
            raise ConfigError(f"collectives {context.name!r}: registered is {registered!r}; give true or false")
        check_mib(context, "smallest_mib", smallest_mib)
        if isinstance(communicators, bool) or communicators not in (1, 2):
            raise ConfigError(f"collectives {context.name!r}: communicators is {communicators!r}; give 1 or 2")
        super().__init__(context)
        # Bytes from which on gather buffers are registered; None for none.
        self._smallest_registered: int | None = smallest_mib * MIB if registered else None
        self.separate_reductions = communicators == 2

    @override
    def _enter(self, context: PluginContext, given: dist.ProcessGroup) -> None:
        super()._enter(context, given)
        self._smallest_registered = None
        self._scope: SharedScope | None = None
        self._gather_channel: _torch_private.Channel | None = None
        self._reduction_channel: _torch_private.Channel | None = None
        self._device_index: int | None = self.device.index

    @override
    def _enter_part(self, whole: NcclCollectives, shared: SharedGroups) -> None:
        super()._enter_part(whole, shared)
        self._smallest_registered = whole._smallest_registered
        self.separate_reductions = whole.separate_reductions

    @override
    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        smallest = self._smallest_registered
        if smallest is None or nbytes < smallest or role is not BufferRole.GATHER:
            return _USUAL_MEMORY
        scope = self._scope
        if torch.cuda.is_current_stream_capturing():
            # New memory would have to be registered, which a capture cannot wait for.
            return scope if scope is not None and scope.has_room(nbytes) else _USUAL_MEMORY
        return scope or self._make_scope()

    @override
    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        # NCCL registers what a graph's operations read and write. With that, replays of gathers and reductions of 32
        # bits over large buffers hang (2.28.9, two H200s; one communicator or two); without it they take as long. NCCL
        # reads this once in a process, with the first operation that is captured.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        if self._scope is not None:
            self._scope.share(stream, like)

    def _make_scope(self) -> AbstractContextManager[Any]:
        # A pool can be registered only with a communicator that exists, and the first operation makes it.
        self.barrier()
        try:
            pool = _torch_private.registered_pool(self.gather_group(), self.device)
        except RuntimeError as error:
            self._warn(f"gathers use plain memory, since registering it failed: {error}; set registered to false")
            self._smallest_registered = None
            return _USUAL_MEMORY
        self._scope = SharedScope(pool, self._device_number())
        return self._scope

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        channel = self._gather_channel or self._open_gathers()
        # The transport checks sizes and dtypes before it sends anything; our checks name what was wrong.
        try:
            if out.dtype in GROUP_DTYPES:
                channel.all_gather(out, shard)
            else:
                channel.all_gather(out.view(torch.uint8), shard.view(torch.uint8))
        except _FAILURES as error:
            check_gather(out, shard, self._rank, self._world_size)
            raise self._translated(error, "all_gather") from error
        return StreamWork(self._device_index)

    @override
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        channel = self._gather_channel or self._open_gathers()
        # Unlike those of single gathers, sizes and dtypes are not checked by the transport.
        check_gathers(pairs, self._rank, self._world_size)
        outs, shards = [out for out, _ in pairs], [shard for _, shard in pairs]
        if not GROUP_DTYPES.issuperset(map(dtype_of, outs)):
            outs = [out if out.dtype in GROUP_DTYPES else out.view(torch.uint8) for out in outs]
            shards = [shard if shard.dtype in GROUP_DTYPES else shard.view(torch.uint8) for shard in shards]
        try:
            channel.all_gather_many(outs, shards)
        except _FAILURES as error:
            raise self._translated(error, "all_gather") from error
        return StreamWork(self._device_index)

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        # Usually off already: gradients are reduced inside a backward.
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._reduce(out, full, op, scratch)
        else:
            self._reduce(out, full, op, scratch)
        return StreamWork(self._device_index)

    def _reduce(self, out: torch.Tensor, full: torch.Tensor, op: ReduceOp, scratch: torch.Tensor | None) -> None:
        channel = self._reduction_channel or self._open_reductions()
        try:
            if out.dtype is full.dtype:
                channel.reduce_scatter(out, full, op)
            else:
                # Narrow values travel and are summed wide on arrival: half the bytes of a wide reduce-scatter.
                received = receive_buffer(full, scratch)
                rows = received.view(self._world_size, out.numel())
                self._exchange(channel, received, full)
                self._reduce_rows(out, rows, op)
        except _FAILURES as error:
            check_slices("reduce_scatter", full, out, self._rank, self._world_size)
            raise self._translated(error, "reduce_scatter") from error

    def _reduce_rows(self, out: torch.Tensor, rows: torch.Tensor, op: ReduceOp) -> None:
        long = out.numel() >= LONG_ROW and out.dtype is torch.float32 and rows.dtype in _HALVES
        kernel = mean_of_rows(rows.dtype, self._world_size, self._device_number()) if long else None
        if kernel is not None and op is ReduceOp.MEAN and kernel.takes(out, rows):
            kernel(out, rows)
        else:
            reduce_rows(out, rows, op)

    @override
    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        if len(triples) == 1 or any(out.dtype is full.dtype for out, full, _ in triples):
            return super().reduce_scatter_many(triples, op=op)
        channel = self._reduction_channel or self._open_reductions()
        # Unlike those of single exchanges, sizes are not checked by the transport.
        for out, full, _ in triples:
            check_slices("reduce_scatter", full, out, self._rank, self._world_size)
        try:
            with torch.no_grad():
                received = [receive_buffer(full, scratch) for _, full, scratch in triples]
                self._exchange_many(channel, received, [full for _, full, _ in triples])
                for (out, _, _), buffer in zip(triples, received, strict=True):
                    self._reduce_rows(out, buffer.view(self._world_size, out.numel()), op)
        except _FAILURES as error:
            raise self._translated(error, "reduce_scatter") from error
        return StreamWork(self._device_index)

    def _exchange(self, channel: _torch_private.Channel, received: torch.Tensor, full: torch.Tensor) -> None:
        """Send each rank its part of ``full``; ``received`` gets this rank's part of every rank's, in their order."""
        if full.dtype in GROUP_DTYPES:
            channel.all_to_all(received, full)
        else:
            channel.all_to_all(received.view(torch.uint8), full.view(torch.uint8))

    def _exchange_many(
        self, channel: _torch_private.Channel, received: list[torch.Tensor], fulls: list[torch.Tensor]
    ) -> None:
        outs, sources = [], []
        for out, full in zip(received, fulls, strict=True):
            known = full.dtype in GROUP_DTYPES
            outs.append(out if known else out.view(torch.uint8))
            sources.append(full if known else full.view(torch.uint8))
        channel.all_to_all_many(outs, sources)

    @override
    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        return 0 if communication_dtype is out_dtype else numel * communication_dtype.itemsize

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        channel = self._reduction_channel or self._open_reductions()
        try:
            channel.all_reduce(tensor, op)
        except _FAILURES as error:
            raise self._translated(error, "all_reduce") from error
        return StreamWork(self._device_index)

    @override
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        source = self._root_of(src)
        try:
            carried = tensor if tensor.dtype in GROUP_DTYPES else tensor.view(torch.uint8)
            dist.broadcast(carried, src=source, group=self.gather_group())
        except _FAILURES as error:
            raise self._translated(error, "broadcast") from error
        return StreamWork(self._device_index)

    @override
    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        # The transport does not check the own block.
        check_blocks(out, out_splits, input, in_splits, self._rank, self._world_size)
        channel = self._reduction_channel or self._open_reductions()
        received, received_splits = carried_blocks(out, out_splits, GROUP_DTYPES)
        sent, sent_splits = carried_blocks(input, in_splits, GROUP_DTYPES)
        try:
            channel.exchange(received, received_splits, sent, sent_splits)
        except _FAILURES as error:
            raise self._translated(error, "all_to_all") from error
        return StreamWork(self._device_index)

    @override
    def barrier(self) -> None:
        try:
            dist.barrier(group=self.gather_group(), device_ids=[self._device_number()])
        except _FAILURES as error:
            raise self._translated(error, "barrier") from error

    def _open_gathers(self) -> _torch_private.Channel:
        self._gather_channel = _torch_private.Channel(self.gather_group(), self.device)
        return self._gather_channel

    def _open_reductions(self) -> _torch_private.Channel:
        self._reduction_channel = _torch_private.Channel(self.reduction_group(), self.device)
        return self._reduction_channel

    def _device_number(self) -> int:
        return torch.cuda.current_device() if self._device_index is None else self._device_index

    def _warn(self, text: str) -> None:
        warn_once(f"collectives {self._context.name!r}: {text}", rank=self._rank)

    @override
    def close(self) -> None:
        self._scope = None
        self._gather_channel = self._reduction_channel = None
        super().close()


class SharedScope:
    """Allocations inside come from ``pool``, in eager steps and captured ones. May be entered again, not nested.

    Only allocations may be inside: an operation would run on a stream that nothing waits for.

    [Note: allocation streams]
    Memory of the pool is allocated under an *allocation stream*, on which nothing runs: one for each stream that uses
    memory. The allocator gives back to a stream what was freed under it. Allocations under a stream that is captured
    come from the graph's own memory, which is neither registered nor mapped by other processes; allocation streams are
    never captured, so that their memory comes from the pool in a capture, too.

    Args:
        pool: of memory that does not come from the usual allocator.
        index: of the CUDA device.
    """

    def __init__(self, pool: torch.cuda.MemPool, index: int) -> None:
        self._pool = pool
        self._inner = _torch_private.PoolScope(pool, index)
        self._index = index
        self._streams: dict[_torch_private.StreamKey, _torch_private.StreamKey] = {}
        self._outer: _torch_private.StreamKey = (0, index, 0)

    def share(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        """Let ``stream`` and ``like`` reuse each other's freed memory. The caller orders the two."""
        self._streams[_torch_private.key_of(stream)] = self._stream_for(_torch_private.key_of(like))

    def has_room(self, nbytes: int) -> bool:
        """Whether the pool has ``nbytes`` free for the current stream. Walks the whole pool."""
        stream = _torch_private.stream_of(self._stream_for(_torch_private.current_stream(self._index)))
        return any(size >= nbytes for size in _torch_private.idle_blocks(self._pool, stream))

    def __enter__(self) -> None:
        outer = _torch_private.current_stream(self._index)
        allocating = self._stream_for(outer)
        # First: where torch refuses, the current stream must stay.
        self._inner.__enter__()
        self._outer = outer
        _torch_private.set_stream(allocating)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _torch_private.set_stream(self._outer)
        self._inner.__exit__(kind, error, at)

    def _stream_for(self, key: _torch_private.StreamKey) -> _torch_private.StreamKey:
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = self._unused_stream() or key
        return found

    def _unused_stream(self) -> _torch_private.StreamKey | None:
        # torch hands out its streams in turns: one that serves another already would let the two have each other's
        # memory. Where all serve, a stream allocates under itself, and its captures use the graph's memory.
        for _ in range(_torch_private.UNUSED_STREAMS):
            key = _torch_private.key_of(_torch_private.unused_stream(self._index))
            if key not in self._streams.values():
                return key
        return None
