"""Every private torch name that the backends use, with the reason."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from polyshard.interfaces import ReduceOp

from .tensors import torch_op

#: A CUDA stream as (stream id, device index, device type).
StreamKey = tuple[int, int, int]

#: Copies each tensor of the second list into that of the first, in few launches; it has no public name.
foreach_copy_: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_


def settle_device_guard() -> None:
    """Let threads plan operations over ``DTensor`` at once.

    The first plan puts another guard of CUDA devices in place, where torch was built for CUDA and there is none. Two
    threads that do so at once crashed. Torch does it by this private function alone. (torch 2.11)
    """
    torch._C._ensureCUDADeviceGuardSet()


def groups_of_this_rank() -> int:
    """The number of process groups that this rank is in.

    A group that its members alone make (``use_local_synchronization``) is named by it in torch 2.11 and 2.13: where it
    differs between them, each waits for the others under another name. No public name tells it.
    """
    return len(dist.distributed_c10d._world.pg_names)


def current_stream(device_index: int) -> StreamKey:
    """The current CUDA stream of a device.

    ``torch.cuda.current_stream`` makes an object for the same three numbers, which takes several times as long.
    """
    key: StreamKey = torch._C._cuda_getCurrentStream(device_index)
    return key


def stream_handle(device_index: int) -> int:
    """CUDA's handle of a device's current stream.

    ``torch.cuda.current_stream().cuda_stream`` makes an object for it; ``torch.compile`` calls this one, too.
    """
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


def set_stream(key: StreamKey) -> None:
    """``torch.cuda.set_stream`` without a stream object."""
    torch._C._cuda_setStream(stream_id=key[0], device_index=key[1], device_type=key[2])


def key_of(stream: torch.cuda.Stream) -> StreamKey:
    """``stream`` as ``current_stream`` describes it."""
    return stream.stream_id, stream.device_index, stream.device_type


def stream_of(key: StreamKey) -> torch.cuda.Stream:
    """The stream that ``current_stream`` described."""
    stream_id, device_index, device_type = key
    stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )
    return stream


class Channel:
    """One process group's operations on flat tensors, issued on the current stream: methods of the transport itself.

    The functions of ``torch.distributed`` add a logger, checks, new options and a dispatcher to each call: about as
    much host time as the transport's own part. With ``asyncOp`` off, NCCL runs an operation on the current stream and
    returns None; other transports return work, which is waited for here. (torch 2.11 to 2.15)

    Sizes and dtypes that do not fit raise before anything is sent, except in the ``_many``, which may not check them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch._C import _distributed_c10d as c10d

        transport: Any = group._get_backend(device)
        self._gather: Any = transport._allgather_base
        # The transport offers it to C++ alone; the group does to Python.
        self._gather_many: Any = group.allgather_into_tensor_coalesced
        self._exchange: Any = transport.alltoall_base
        # NCCL launches the exchanges between the two at once. torch has no operation for several exchanges.
        self._begin_launch: Any = group._start_coalescing if transport.supports_coalescing else None
        self._end_launch: Any = group._end_coalescing
        self._device = device
        self._scatter: Any = transport._reduce_scatter_base
        self._reduce: Any = transport.allreduce
        self._gather_options: Any = _on_current_stream(c10d.AllgatherOptions())
        self._exchange_options: Any = _on_current_stream(c10d.AllToAllOptions())
        self._scatter_options: dict[ReduceOp, Any] = {}
        self._reduce_options: dict[ReduceOp, Any] = {}
        for op in ReduceOp:
            self._scatter_options[op] = _on_current_stream(c10d.ReduceScatterOptions())
            self._scatter_options[op].reduceOp = torch_op(op)
            self._reduce_options[op] = _on_current_stream(c10d.AllreduceOptions())
            self._reduce_options[op].reduceOp = torch_op(op)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """``out``: ``[world_size * n]``; ``shard``: ``[n]``, same dtype."""
        work = self._gather(out, shard, self._gather_options)
        if work is not None:
            work.wait()

    def all_gather_many(self, outs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        work = self._gather_many(outs, shards, self._gather_options)
        if work is not None:
            work.wait()

    def all_to_all(self, out: torch.Tensor, full: torch.Tensor) -> None:
        """Both ``[world_size * n]``, same dtype."""
        work = self._exchange(out, full, [], [], self._exchange_options)
        if work is not None:
            work.wait()

    def exchange(self, out: torch.Tensor, out_splits: list[int], source: torch.Tensor, in_splits: list[int]) -> None:
        """``all_to_all`` of blocks of these sizes, one for each rank; both flat, of one dtype."""
        work = self._exchange(out, source, out_splits, in_splits, self._exchange_options)
        if work is not None:
            work.wait()

    def all_to_all_many(self, outs: list[torch.Tensor], fulls: list[torch.Tensor]) -> None:
        """``all_to_all`` of each pair, in one launch where the transport has those."""
        if self._begin_launch is None:
            for out, full in zip(outs, fulls, strict=True):
                self.all_to_all(out, full)
            return
        self._begin_launch(self._device)
        try:
            for out, full in zip(outs, fulls, strict=True):
                self._exchange(out, full, [], [], self._exchange_options)
        finally:
            # Also after an error: the transport would go on collecting.
            work = self._end_launch(self._device)
        if work is not None:
            work.wait()

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, op: ReduceOp) -> None:
        """``out``: ``[n]``; ``full``: ``[world_size * n]``, same dtype."""
        work = self._scatter(out, full, self._scatter_options[op])
        if work is not None:
            work.wait()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        work = self._reduce([tensor], self._reduce_options[op])
        if work is not None:
            work.wait()


def _on_current_stream(options: Any) -> Any:
    options.asyncOp = False
    return options


class PoolScope:
    """This thread allocates from ``pool`` inside: ``torch.cuda.use_mem_pool`` without a generator for each use.

    May be entered again and again, not nested. (torch 2.11 to 2.15)
    """

    __slots__ = ("_begin", "_end", "_id", "_index", "_pool", "_release")

    def __init__(self, pool: torch.cuda.MemPool, device_index: int) -> None:
        self._pool = pool
        self._id = pool.id
        self._index = device_index
        self._begin = torch._C._cuda_beginAllocateCurrentThreadToPool
        self._end = torch._C._cuda_endAllocateToPool
        self._release = torch._C._cuda_releasePool

    def __enter__(self) -> None:
        self._begin(self._index, self._id)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(self._index, self._id)
        self._release(self._index, self._id)


def registered_pool(group: dist.ProcessGroup, device: torch.device) -> torch.cuda.MemPool:
    """Memory that is registered with ``group``'s communicator as it is taken; the communicator must exist.

    Raises:
        RuntimeError: this NCCL, or this torch, cannot register memory.
    """
    transport: Any = group._get_backend(device)
    try:
        pool = torch.cuda.MemPool(transport.mem_allocator)
        transport.register_mem_pool(pool)
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__} cannot register memory with {transport}") from error
    return pool


class SymmetricHandle(Protocol):
    """A segment of memory that every rank of a group has, and each rank has mapped of every other."""

    @property
    def buffer_ptrs(self) -> list[int]:
        """Address in this process of each rank's segment, by rank of the group."""

    @property
    def buffer_size(self) -> int:
        """Bytes of the segment."""

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        """A tensor over a rank's segment; the offset is in elements."""

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Order the current stream after every rank's own. The device fails where a rank stays away too long."""


def symmetric_problem(device_index: int) -> str:
    """The reason why other processes of the host cannot map this process's memory; empty where none is known.

    Symmetric memory is public in no version yet. torch must have it in plain CUDA memory, and multicast must be off:
    no operation here needs it, and some hosts cannot set it up.
    """
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        kind = _symmetric_memory.get_backend(torch.device("cuda", device_index))
        multicast = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device_index)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} has no symmetric memory here: {error}"
    if kind != "CUDA":
        return f"symmetric memory is provided by {kind}, not by CUDA itself; unset TORCH_SYMMMEM"
    if multicast:
        return "symmetric memory would set up multicast; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
    return ""


def nvlinks(device_index: int) -> tuple[int, ...] | None:
    """The devices of this process that NVLink connects with ``device_index``; None where this cannot be told.

    torch reads them from NVML (2.5 to 2.13). No public name tells NVLink from PCIe: peer access works over both.
    """
    try:
        from torch._C import _distributed_c10d
        from torch._C._autograd import DeviceType

        detect: Any = vars(_distributed_c10d)["_detect_dma_connectivity"]
        row = detect(DeviceType.CUDA, "nvlink").matrix[device_index]
    except (ImportError, LookupError, RuntimeError):
        return None
    return tuple(other for other, links in enumerate(row) if links > 0)


def splits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``dist.split_group`` can split the communicator of ``group``, which that function asks in private."""
    try:
        return bool(group._get_backend(device).supports_splitting)
    except (AttributeError, RuntimeError):
        return False


def symmetric_groups() -> set[tuple[int, ...]]:
    """The ranks of each group for which a program of this process enabled torch's symmetric memory.

    Tensor parallelism that overlaps its communication does (2.11 and 2.13); no public name tells.
    """
    module: Any = sys.modules.get("torch.distributed._symmetric_memory")
    resolve: Any = vars(dist.distributed_c10d).get("_resolve_process_group")
    found = set()
    for name in getattr(module, "_group_name_to_store", ()):
        # A group may have been destroyed.
        with suppress(TypeError, RuntimeError, ValueError, KeyError):
            found.add(tuple(dist.get_process_group_ranks(resolve(name))))
    return found


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long operations of ``group`` wait for a rank; nothing where this torch does not tell (2.11 and 2.13 do)."""
    try:
        transport: Any = group._get_backend(device)
        found: timedelta = transport.options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(0)
    return found


def symmetric_pool(device: torch.device, *, divisible: bool) -> torch.cuda.MemPool:
    """A pool whose memory other processes can map.

    ``divisible``: parts of a segment may serve different allocations.

    Raises:
        RuntimeError: this torch has none.
    """
    try:
        from torch.distributed import _symmetric_memory

        allocator = _symmetric_memory.get_mempool_allocator(device)
        # An out-of-memory that used this pool would let ranks allocate differently.
        return torch.cuda.MemPool(allocator, use_on_oom=False, no_split=not divisible)
    except (ImportError, AttributeError, TypeError) as error:
        raise RuntimeError(f"torch {torch.__version__} has no pools of symmetric memory: {error}") from error


def holds(pool: torch.cuda.MemPool, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in memory of ``pool``."""
    held: list[dict[str, Any]] = pool.snapshot()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    return any(0 <= address - segment["address"] < segment["total_size"] for segment in held)


def idle_blocks(pool: torch.cuda.MemPool, stream: torch.cuda.Stream) -> list[int]:
    """Bytes of each free block of ``pool`` that ``stream`` could be given now."""
    held: list[dict[str, Any]] = pool.snapshot()  # type: ignore[no-untyped-call]
    return [
        block["size"]
        for segment in held
        if segment["stream"] == stream.cuda_stream
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


#: Streams of one priority, which torch hands out in turns.
UNUSED_STREAMS = 32


def unused_stream(device_index: int) -> torch.cuda.Stream:
    """A stream of an unused priority, to allocate memory under; nothing runs on it.

    On a device without that priority it may be a stream that is captured; allocations under it then come from the
    graph's memory, as they would without it.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device_index, priority=-3)  # type: ignore[no-untyped-call]
    return stream


def symmetric_handle(tensor: torch.Tensor, group: dist.ProcessGroup) -> SymmetricHandle | None:
    """The segment in which ``tensor`` lies; None where it is in other memory. Every rank calls it.

    Meets the other ranks where the segment is new to ``group``.

    Raises:
        RuntimeError: a rank could not map another's segment.
    """
    from torch.distributed import _symmetric_memory

    with warnings.catch_warnings():
        # Some versions warn of a tensor in other memory, for which None is the answer here.
        warnings.simplefilter("ignore")
        handle: SymmetricHandle | None = _symmetric_memory.rendezvous(tensor, group.group_name)
    return handle
