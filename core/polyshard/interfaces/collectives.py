"""The contract of collectives, which move bytes between ranks, and the base of decorators around others."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from typing_extensions import override

from ..errors import PluginContractError, different_calls, plugin_name, told
from .units import UnitSpec

#: The largest world size: plans and messages list ranks.
MOST_RANKS = 1 << 20


class ReduceOp(enum.Enum):
    """The operation of a reduction."""

    SUM = "sum"
    """Element-wise sum."""
    MEAN = "mean"
    """Element-wise sum divided by the number of ranks."""
    MAX = "max"
    """Element-wise maximum."""
    MIN = "min"
    """Element-wise minimum."""


class BufferRole(enum.Enum):
    """The use of a buffer; a backend may allocate each from other memory."""

    GATHER = "gather"
    """A whole unit in compute dtype: the output of ``all_gather``, whose own slice is the input."""
    REDUCE = "reduce"
    """A whole unit's gradients in communication dtype: the input of ``reduce_scatter``."""


@runtime_checkable
class Work(Protocol):
    """A collective that was issued."""

    def wait(self) -> None:
        """Make the result usable. Idempotent.

        A stream-ordered backend orders the *current stream* after the operation and returns at once; others block the
        calling thread. Local work that follows the operation (the sum after an all-to-all) is enqueued here.
        """


class _Completed:
    def wait(self) -> None:
        return None


#: The ``Work`` of an operation that was complete when it was issued.
COMPLETED: Work = _Completed()


class _Together:
    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


#: Bytes of whole buffers up to which gathers of several are one: a latency costs more than two copies of so many.
PACKED_NBYTES = 4 << 20


class _PackedGather:
    """Gathers of several buffers as one. In between, the shards of each rank stand side by side, as bytes."""

    def __init__(self, among: Collectives, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        ranks, rank = among.world_size, among.rank
        shards = [shard.view(torch.uint8) for _, shard in pairs]
        sizes = [shard.numel() for shard in shards]
        rows = torch.empty(ranks, sum(sizes), dtype=torch.uint8, device=among.device)
        torch.cat(shards, out=rows[rank])
        self._outs = [out.view(torch.uint8).view(ranks, size) for (out, _), size in zip(pairs, sizes, strict=True)]
        self._columns = torch.split(rows, sizes, dim=1)
        self._work = issued(among.all_gather(rows.view(-1), rows[rank]), "all_gather", among)

    def wait(self) -> None:
        self._work.wait()
        for out, column in zip(self._outs, self._columns, strict=True):
            out.copy_(column)
        self._outs, self._columns = [], ()


def issued(work: Any, operation: str, collectives: Collectives, unit: UnitSpec | None = None) -> Work:
    """``work``, which ``operation`` of ``collectives`` returned. ``unit``: None for several.

    Raises PluginContractError: it cannot be waited for.
    """
    if not hasattr(work, "wait"):
        about = "" if unit is None else f" for unit '{unit.label}'"
        raise PluginContractError(
            f"{operation} of {plugin_name(collectives)} returned {told(work)}{about} (rank {collectives.rank}), "
            "which cannot be waited for. Return a Work, COMPLETED where nothing is left to do."
        )
    done: Work = work
    return done


@dataclass(frozen=True, slots=True)
class CollectivesCapabilities:
    """The features of a backend. The engine asks these, and never a backend's name or type."""

    devices: frozenset[str]
    """Device types of its tensors, for example ``frozenset({"cpu"})``."""
    dtypes: frozenset[torch.dtype]
    """Dtypes that ``reduce_scatter`` and ``all_reduce`` take. ``all_gather`` must take every dtype."""
    reduce_ops: frozenset[ReduceOp]
    """Operations that ``reduce_scatter`` and ``all_reduce`` take."""
    widening: bool
    """``reduce_scatter`` accepts an ``out`` of a wider dtype than ``full`` and then accumulates in ``out``'s dtype."""
    stream_ordered: bool
    """Operations are ordered by device streams and ``Work.wait`` does not block the host."""
    capturable: bool
    """Operations may be recorded in a CUDA graph."""
    fixed_addresses: bool
    """Gather buffers come from ``lease``; otherwise the engine allocates and resizes its own."""
    can_communicate: bool
    """Bytes travel. False for stand-ins, whose ranks are never compared with each other."""
    announces: bool = False
    """``announce`` compares the ranks' next operations, cheaply enough for every step."""
    min_world_size: int = 1
    """Smallest number of ranks that it serves."""
    max_world_size: int | None = None
    """Largest number of ranks that it serves; None for no limit."""
    exchanges: bool = False
    """``all_to_all`` is implemented. Plain sharding does not need it; optimizers that do refuse a backend without."""
    blends: bool = False
    """An element of a mean may depend on its neighbours: blocks share a scale, say. The engine then zeroes the padding
    between parameters before a reduction; otherwise padding may hold anything."""


class Collectives(ABC):
    """A group of ranks that exchange tensors.

    A plugin is a callable ``(context: PluginContext, **options) -> Collectives``; a subclass of this class is one.

    **Construction is cheap and does not communicate.** Make communicators, threads and registrations at first use: a
    model of forty units constructs one instance for each ``fully_shard`` call and then uses the root's alone.

    **Order and streams.** Every rank issues the same operations in the same order, each with its stream current. Units
    are gathered on one stream and reduced on another; the two must be able to overlap, so make as many communicators as
    that takes. Exchanges may come from a third stream; they must be able to overlap with gathers, not with reductions.

    **Lifetime.** The caller keeps the tensors of an operation allocated until it has called ``Work.wait`` and, on a
    stream-ordered backend, until the work enqueued before that wait has run.

    **Errors.** A failure raises a ``polyshard.errors.CollectiveError``. A rank that never arrives makes the others
    raise ``CollectiveTimeoutError`` within ``context.timeout``, rather than hang.
    """

    api_version: ClassVar[int]
    """The version of this contract that a plugin was written for. Each class states its own; none is inherited."""

    @property
    @abstractmethod
    def capabilities(self) -> CollectivesCapabilities:
        """The features of this backend; constant over the instance's life."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank within the group, in ``range(world_size)``."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of its tensors."""

    @property
    def process_group(self) -> Any | None:
        """The ``torch.distributed.ProcessGroup`` behind it, or None."""
        return None

    @property
    def reason(self) -> str:
        """One line for people: what it chose by itself, and why; empty where it chooses nothing.

        Equal on all ranks of the group. It may change once ranks have met. Reading it does not communicate.
        ``polyshard.report`` and ``polyshard explain`` show it. A factory whose collectives cannot be constructed
        without ranks may have an attribute of this name, a text, which ``polyshard explain`` shows instead.
        """
        return ""

    @property
    def replicas(self) -> Collectives | None:
        """Jobs elsewhere that train the same model; None where this group is all there is.

        Its ``all_reduce`` with ``ReduceOp.MEAN`` averages over the jobs that are there, this one among them. Rank k
        meets rank k of each other job; all have the same number of ranks. The engine calls it behind each reduction of
        gradients in this group, and nothing else of it. Who is there may change between steps: no rank elsewhere is
        counted, and its ``world_size`` is 1.

        What is lost on the way there must not raise where the job can go on without it: the plugin tells its caller
        whether the step counts. Asked for once, at wrap.
        """
        return None

    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        """A context in which the engine allocates a storage of ``nbytes`` for ``role``: plain, registered or symmetric.

        Entered for every gather and reduction, on the stream that uses the memory first. Nothing is computed inside, so
        a backend may make another stream the current one there.
        """
        return nullcontext()

    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        """Called before a step is captured in a CUDA graph on ``stream``; equal steps ran on ``like``, and have ended.

        All memory of ``allocation`` is free again, and may serve the capture: the engine frees its buffers before each
        replay, and orders replays and other uses of that memory after each other.
        """
        return None

    def lease(self, numel: int, dtype: torch.dtype, role: BufferRole) -> torch.Tensor:
        """A buffer of ``numel`` elements at a fixed address, from a ring that the backend keeps.

        Called once for each unit at wrap, and only where ``capabilities.fixed_addresses``. The backend decides how many
        units share one slot, since the engine cannot resize foreign storages.
        """
        raise NotImplementedError(f"{type(self).__name__} does not lease buffers")

    @abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill ``out`` with every rank's ``shard``, in rank order.

        ``out``: shape ``[world_size * n]``, contiguous; ``shard``: shape ``[n]``, same dtype. ``shard`` may be this
        rank's own slice of ``out``, which must then not be copied.
        """

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        """``all_gather(out, shard)`` for each of ``pairs`` in turn; one ``Work`` for all.

        Called for neighbouring small units, for the units of one module, and for the parameters of one unit. Small ones
        travel as one here, and are copied to where they belong. Override it where one launch of many operations takes
        less time than many launches. Number, sizes and order of ``pairs`` are the same on every rank; dtypes may differ
        between pairs.
        """
        if len(pairs) > 1 and not self.capabilities.fixed_addresses:
            ranks, nbytes = self.world_size, 0
            for out, shard in pairs:
                nbytes += out.nbytes
                # What does not fit is left to the operation's own checks.
                if nbytes > PACKED_NBYTES or out.nbytes != ranks * shard.nbytes or out.dtype is not shard.dtype:
                    break
            else:
                return _PackedGather(self, pairs)
        return _Together([issued(self.all_gather(out, shard), "all_gather", self) for out, shard in pairs])

    @abstractmethod
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        """Reduce ``full`` over ranks and keep this rank's slice.

        ``out``: shape ``[n]``; ``full``: shape ``[world_size * n]``, contiguous; may be overwritten. With ``F_k`` the
        ``full`` of rank ``k`` and ``s`` this rank's slice, ``out = op_k(F_k[s])``. Where ``capabilities.widening``,
        ``out`` may have a wider dtype, in which the values are then accumulated. ``scratch``: uint8, of at least
        ``scratch_nbytes(...)`` bytes, or None.
        """

    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        """``reduce_scatter(out, full, op=op, scratch=scratch)`` for each of ``triples``; one ``Work`` for all.

        Called for neighbouring units of medium size, and for the units of one module; see ``all_gather_many``.
        """
        works = (self.reduce_scatter(out, full, op=op, scratch=scratch) for out, full, scratch in triples)
        return _Together([issued(work, "reduce_scatter", self) for work in works])

    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        """Bytes of scratch that ``reduce_scatter`` wants for a ``full`` of ``numel`` elements; 0 for none."""
        return 0

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        """Reduce ``tensor`` (any shape, contiguous) over ranks, in place: gradients over replicas, norms, flags."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        """Overwrite ``tensor`` (contiguous, any dtype) with that of group rank ``src``. Called at wrap and by state."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        """Send block ``j`` of ``input`` to rank ``j``, and receive rank ``j``'s block for this rank as block ``j``.

        ``out``: shape ``[sum(out_splits)]``, contiguous; ``input``: shape ``[sum(in_splits)]``, contiguous, same dtype
        (any), unchanged. They do not overlap. Blocks lie in rank order, this rank's own among them. Splits count
        elements, one for each rank; all may be 0. ``out_splits[j]`` of rank ``i`` is ``in_splits[i]`` of rank ``j``:
        both ranks know it, and it is never communicated. Every rank makes the call.

        Called by optimizers, where ``capabilities.exchanges``.

        Raises:
            CollectiveError: before anything is sent, for splits that are not one for each rank, do not add up, or
                differ for this rank's own block, and for tensors of two dtypes or that are not flat.
        """
        raise NotImplementedError(f"{type(self).__name__} does not exchange blocks between ranks")

    def announce(self, what: str) -> None:
        """Compare the next operation, in this group or a part of it: ranks that issue the same pass the same text.

        Called in the first step, before its gathers and reductions, and in every step where
        ``capabilities.announces``. Ranks that diverged learn of it before bytes of one unit arrive in another. It may
        wait for the other ranks, or let the next operation fail. By default ranks exchange their texts.

        Raises:
            RankMismatchError: texts differ; on every rank, here or in the wait for the next operation.
        """
        everyone = self.all_gather_object(what)
        if any(other != what for other in everyone):
            raise different_calls(self.rank, everyone)

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable ``obj``, in rank order. Blocks; called at wrap and in checkpoints, not in steps."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank has arrived. Called by measurements, not by the engine."""

    @abstractmethod
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Collectives:
        """The subgroup that contains this rank.

        ``rank_lists``: disjoint lists of group ranks that cover the group, the same on every rank; every rank calls
        it. Ranks within a subgroup are numbered in the order of their list.

        Called at wrap. Parts of equal lists may share communicators, which are released with the last of them that is
        closed.
        """

    def close(self) -> None:
        """Release communicators and memory. Idempotent.

        Called by ``polyshard.close``, on every rank in the same order, between steps: parts before their group. It may
        communicate. Never called from a finalizer, since ranks collect garbage at different times: an instance that is
        dropped unclosed must not communicate. A group that the context gave stays open.
        """
        return None


#: An operation that a decorator may override, and the batched one that must then go through it.
_MANY = {"all_gather": "all_gather_many", "reduce_scatter": "reduce_scatter_many"}


class CollectivesDecorator(Collectives):
    """Base of collectives around others: ``{"name": "compressed", "inner": "nccl"}`` in the configuration.

    Every member calls ``inner``; a subclass overrides what it changes. Its factory makes the inner collectives by
    ``context.construct(Group.COLLECTIVES, inner)``, so that ranks compare these, too. ``around`` decorates a part of
    the ranks::

        class Counting(CollectivesDecorator):
            api_version = 1

            def __init__(self, context, inner="auto"):
                super().__init__(context.construct(Group.COLLECTIVES, inner))
                self.gathers = 0

            def around(self, inner):
                part = copy.copy(self)
                part.inner = inner
                return part

            def all_gather(self, out, shard):
                self.gathers += 1
                return super().all_gather(out, shard)

    Where a subclass overrides ``all_gather`` or ``reduce_scatter`` alone, batches go through that, and not through
    ``all_gather_many`` or ``reduce_scatter_many`` of ``inner``. A subclass that changes what an operation needs (leased
    memory, capture, streams) changes ``capabilities`` as well.
    """

    inner: Collectives

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner

    @override
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for one, many in _MANY.items():
            if one in cls.__dict__ and many not in cls.__dict__:
                setattr(cls, many, getattr(Collectives, many))

    @abstractmethod
    def around(self, inner: Collectives) -> Collectives:
        """The same decorator, with its settings, around ``inner``: a part of the ranks."""

    @property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        return self.inner.capabilities

    @property
    @override
    def rank(self) -> int:
        return self.inner.rank

    @property
    @override
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    @override
    def device(self) -> torch.device:
        return self.inner.device

    @property
    @override
    def process_group(self) -> Any | None:
        return self.inner.process_group

    @property
    @override
    def reason(self) -> str:
        return self.inner.reason

    @property
    @override
    def replicas(self) -> Collectives | None:
        return self.inner.replicas

    @override
    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        return self.inner.allocation(role, nbytes)

    @override
    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        self.inner.prepare_capture(stream, like)

    @override
    def lease(self, numel: int, dtype: torch.dtype, role: BufferRole) -> torch.Tensor:
        return self.inner.lease(numel, dtype, role)

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self.inner.all_gather(out, shard)

    @override
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return self.inner.all_gather_many(pairs)

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        return self.inner.reduce_scatter(out, full, op=op, scratch=scratch)

    @override
    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        return self.inner.reduce_scatter_many(triples, op=op)

    @override
    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        return self.inner.scratch_nbytes(role, numel, communication_dtype, out_dtype)

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return self.inner.all_reduce(tensor, op=op)

    @override
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return self.inner.broadcast(tensor, src)

    @override
    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        return self.inner.all_to_all(out, out_splits, input, in_splits)

    @override
    def announce(self, what: str) -> None:
        self.inner.announce(what)

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.inner.all_gather_object(obj)

    @override
    def barrier(self) -> None:
        self.inner.barrier()

    @override
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Collectives:
        return self.around(self.inner.partition(rank_lists))

    @override
    def close(self) -> None:
        self.inner.close()
