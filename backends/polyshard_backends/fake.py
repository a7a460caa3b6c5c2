"""One rank of a pretended world, in one process: for dry runs, memory estimates and tests of host cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from polyshard.errors import CollectiveError, ConfigError, WorldSizeError
from polyshard.interfaces import (
    COMPLETED,
    MOST_RANKS,
    Collectives,
    CollectivesCapabilities,
    PluginContext,
    RankAndSize,
    ReduceOp,
    Work,
)
from typing_extensions import override

from . import _torch_private
from .tensors import REDUCIBLE_DTYPES, check_blocks, check_source, own_group

#: Number of calls that are kept: a few steps of a large model, bounded for long runs.
CALLS_KEPT = 16384

#: Bytes of a shard from which on its copies take longer on a device than a look at it on the host.
_LARGE = 1 << 20


class FakeCall(NamedTuple):
    """One operation that was issued."""

    operation: str
    """Name of the method."""
    numel: int
    """Elements of the whole buffer: ``world_size`` slices for ``all_gather`` and ``reduce_scatter``, the input for
    ``all_to_all``."""
    dtype: torch.dtype
    """Dtype that would travel."""
    sent: int
    """Elements that this rank would send to others, each of them straight to where it belongs: without its own slice or
    block. ``all_reduce`` is counted as a reduction and a gather of slices, rounded down."""

    @property
    def sent_nbytes(self) -> int:
        return self.sent * self.dtype.itemsize


class _StreamWork:
    """Orders the waiting stream after the one on which the operation was issued."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class FakeCollectives(Collectives):
    """Answers as if every rank had sent what this one sends.

    ``all_gather`` fills every slice, ``reduce_scatter`` and ``all_reduce`` apply the operation to ``world_size`` equal
    contributions, ``broadcast`` leaves the tensor as it is. ``all_to_all`` fills every block with this rank's own;
    where their sizes differ, so that ranks cannot all have sent the same, those of others are zeros. Nothing travels.

    Args:
        context: its ``process_group``, where that has ``rank()`` and ``size()``, supplies what the options leave out.
        rank: the pretended rank; 0 by default.
        world_size: the pretended number of ranks; 1 by default.

    Raises:
        ConfigError: ``rank`` or ``world_size`` is not an integer.
        WorldSizeError: ``world_size`` is below 1 or above ``MOST_RANKS``, or ``rank`` outside ``range(world_size)``.
    """

    api_version = 1

    def __init__(self, context: PluginContext, rank: int | None = None, world_size: int | None = None) -> None:
        group = context.process_group
        if isinstance(group, RankAndSize) and rank is None and world_size is None:
            rank, world_size = group.rank(), group.size()
        rank = 0 if rank is None else rank
        world_size = 1 if world_size is None else world_size
        for option, value in (("rank", rank), ("world_size", world_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"collectives {context.name!r}: {option} is {value!r}; give an integer")
        if not 1 <= world_size <= MOST_RANKS or not 0 <= rank < world_size:
            raise WorldSizeError(
                f"collectives {context.name!r}: rank {rank} of {world_size} does not exist; give a world_size of at "
                f"least 1 and at most {MOST_RANKS}, and a rank from 0 to world_size - 1"
            )
        self._context = context
        self._rank = rank
        self._world_size = world_size
        self._stream_ordered = context.device.type == "cuda"
        # On the meta device operations would show to whoever watches them, and do nothing.
        self._has_values = context.device.type != "meta"
        self._capabilities = CollectivesCapabilities(
            devices=frozenset({"cpu", "cuda", "meta", context.device.type}),
            dtypes=REDUCIBLE_DTYPES,
            reduce_ops=frozenset(ReduceOp),
            widening=True,
            stream_ordered=self._stream_ordered,
            capturable=self._stream_ordered,
            fixed_addresses=False,
            can_communicate=False,
            exchanges=True,
        )
        self.calls: deque[FakeCall] = deque(maxlen=CALLS_KEPT)
        """The latest operations, oldest first."""
        self.record: Callable[[Sequence[FakeCall]], None] = self.calls.extend
        """Called with the operations of each launch."""
        self.batches: deque[int] = deque(maxlen=CALLS_KEPT)
        """Number of operations in each ``all_gather_many``, oldest first."""
        self.reduction_batches: deque[int] = deque(maxlen=CALLS_KEPT)
        """Number of operations in each ``reduce_scatter_many``, oldest first."""

    @property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        return self._capabilities

    @property
    @override
    def rank(self) -> int:
        return self._rank

    @property
    @override
    def world_size(self) -> int:
        return self._world_size

    @property
    @override
    def device(self) -> torch.device:
        return self._context.device

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._gather(((out, shard),))

    @override
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        self.batches.append(len(pairs))
        return self._gather(pairs)

    def _gather(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        world_size = self._world_size
        wholes, sources, calls = [], [], []
        for out, shard in pairs:
            dtype = out.dtype
            if shard.dtype is not dtype:
                raise CollectiveError(
                    f"all_gather on rank {self._rank}: out is {dtype} and the shard {shard.dtype}; cast before the call"
                )
            n = shard.numel()
            calls.append(FakeCall("all_gather", world_size * n, dtype, (world_size - 1) * n))
            if n * dtype.itemsize >= _LARGE:
                out, shard = _in_words(out, shard)
                n = shard.numel()
            wholes.append(out.view(world_size, n))
            sources.append(shard.expand(world_size, n))
        # The expanded sources make this few kernels for any world size. Where a shard is out's own slice, that slice is
        # written with the values it holds.
        if not self._has_values:
            pass
        elif len(wholes) == 1:
            wholes[0].copy_(sources[0])
        elif wholes and self._stream_ordered:
            # Row by row both sides are contiguous, which is what a device needs to copy many at once.
            rows = [row for whole in wholes for row in whole.unbind()]
            _torch_private.foreach_copy_(rows, [row for source in sources for row in source.unbind()])
        elif wholes:
            _torch_private.foreach_copy_(wholes, sources)
        self.record(calls)
        return _StreamWork() if self._stream_ordered else COMPLETED

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        if self._has_values:
            out.copy_(full.view(self._world_size, out.numel())[self._rank])
            if op is ReduceOp.SUM and self._world_size > 1:
                out.mul_(self._world_size)
        self.record([FakeCall("reduce_scatter", full.numel(), full.dtype, full.numel() - out.numel())])
        return _StreamWork() if self._stream_ordered else COMPLETED

    @override
    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        self.reduction_batches.append(len(triples))
        return super().reduce_scatter_many(triples, op=op)

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        numel, world_size = tensor.numel(), self._world_size
        if op is ReduceOp.SUM and world_size > 1 and self._has_values:
            tensor.mul_(world_size)
        self.record([FakeCall("all_reduce", numel, tensor.dtype, 2 * (world_size - 1) * numel // world_size)])
        return _StreamWork() if self._stream_ordered else COMPLETED

    @override
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        check_source(src, self._rank, self._world_size)
        receivers = self._world_size - 1 if src == self._rank else 0
        self.record([FakeCall("broadcast", tensor.numel(), tensor.dtype, receivers * tensor.numel())])
        return COMPLETED

    @override
    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        rank, world_size = self._rank, self._world_size
        check_blocks(out, out_splits, input, in_splits, rank, world_size)
        n = in_splits[rank]
        own = input.narrow(0, sum(in_splits[:rank]), n)
        if n and all(numel in (0, n) for numel in out_splits):
            out.view(-1, n).copy_(own.expand(out.numel() // n, n))
        else:
            out.zero_()
            out.narrow(0, sum(out_splits[:rank]), n).copy_(own)
        self.record([FakeCall("all_to_all", input.numel(), input.dtype, input.numel() - n)])
        return _StreamWork() if self._stream_ordered else COMPLETED

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self._world_size

    @override
    def barrier(self) -> None:
        return None

    @override
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> FakeCollectives:
        members = own_group(rank_lists, self._rank, self._world_size)
        return FakeCollectives(self._context, rank=members.index(self._rank), world_size=len(members))


def _in_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same memory in elements of 8 bytes, where all tensors allow it.

    A device copies an expanded tensor element by element: of 2 bytes each, in 1.8 times the time (one H100).
    """
    fit = all((each.numel() * each.itemsize) % 8 == each.storage_offset() * each.itemsize % 8 == 0 for each in tensors)
    return tuple(each.view(torch.int64) for each in tensors) if fit else tensors
