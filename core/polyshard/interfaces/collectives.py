"""The contract for whatever moves bytes between ranks."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

#: Of any world. Plans and messages list ranks, and numbers beyond are mistakes.
MOST_RANKS = 1 << 20


class ReduceOp(enum.Enum):
    """How the ranks' values become one."""

    SUM = "sum"
    """Element-wise sum."""
    MEAN = "mean"
    """Element-wise sum divided by the number of ranks."""
    MAX = "max"
    """Element-wise maximum."""
    MIN = "min"
    """Element-wise minimum."""


class BufferRole(enum.Enum):
    """What a buffer is used for; a backend may serve each from other memory."""

    GATHER = "gather"
    """A whole unit in compute dtype: the output, and in place the input, of ``all_gather``."""
    REDUCE = "reduce"
    """A whole unit's gradients in wire dtype: the input of ``reduce_scatter``."""


@runtime_checkable
class Work(Protocol):
    """A collective that was issued."""

    def wait(self) -> None:
        """Make the result usable.

        On a stream-ordered backend this orders the *current stream* after the operation and returns at once; on others
        it blocks the calling thread. A local part that the operation still owes (the sum after an all-to-all) is
        enqueued here. Idempotent.
        """


class _Completed:
    def wait(self) -> None:
        return None


#: The ``Work`` of an operation that had nothing left to do when it was issued.
COMPLETED: Work = _Completed()


class _Together:
    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


@dataclass(frozen=True, slots=True)
class CollectivesCapabilities:
    """What a backend can do. The engine asks these and never a backend's name or type."""

    devices: frozenset[str]
    """Device types whose tensors it takes, for example ``frozenset({"cpu"})``."""
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
    """Buffers must come from ``lease``; otherwise the engine allocates and resizes its own."""
    can_communicate: bool
    """Bytes really travel. False for stand-ins: ranks are then never compared with each other."""
    announces: bool = False
    """``announce`` compares what ranks are about to do, at a price that every step may pay."""
    min_world_size: int = 1
    """Smallest number of ranks that it serves."""
    max_world_size: int | None = None
    """Largest number of ranks that it serves; None for no limit."""
    exchanges: bool = False
    """``all_to_all`` is there. What needs it refuses a backend without it by name; plain sharding does not."""
    blends: bool = False
    """An element of a mean may depend on its neighbours, as where blocks share a scale. What lies between parameters is
    then zero in what is reduced; otherwise some of it may be anything."""


class Collectives(ABC):
    """A group of ranks that exchange tensors.

    A plugin is a callable ``(context: PluginContext, **options) -> Collectives``; a subclass of this class is one.

    **Construction is cheap and does not communicate.** Communicators, threads and registrations are made at first
    use: a model of forty units constructs one instance for each ``fully_shard`` call and then uses only the root's.

    **Order.** The engine issues operations in the same order on every rank. Gathers and reductions are issued from
    different streams and must be able to overlap, so a backend makes as many communicators as that takes. Exchanges
    may come from a third stream: gathers must be able to overlap with them, too; reductions, which leave what they
    carry, need not.

    **Lifetime.** Buffers given to an operation stay allocated until its ``Work.wait`` has been called and, on a
    stream-ordered backend, until work enqueued before that wait has run.

    **Errors.** A failure raises from ``polyshard.errors.CollectiveError``; a rank that never arrives raises
    ``CollectiveTimeoutError`` within ``context.timeout`` rather than hang.
    """

    api_version: ClassVar[int]
    """Which version of this contract a plugin was written for. Each says its own: there is none to inherit."""

    @property
    @abstractmethod
    def capabilities(self) -> CollectivesCapabilities:
        """What this backend can do; constant over the instance's life."""

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
        """Device of the tensors that it takes."""

    @property
    def process_group(self) -> Any | None:
        """The ``torch.distributed.ProcessGroup`` behind it, or None where there is none."""
        return None

    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        """A context in which the engine allocates a storage of ``nbytes`` for ``role``: plain, registered or symmetric.

        Entered anew for every gather and reduction, on the stream that will use the memory first. Nothing is computed
        inside: a backend may let another stream be the current one there.
        """
        return nullcontext()

    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        """A step is about to be captured in a CUDA graph on ``stream``; steps like it ran on ``like``, none does now.

        What ``allocation`` gave to those is free again. The capture may be given the same memory: the engine frees its
        buffers before each replay, and orders replays after whatever used them, and that after replays.
        """
        return None

    def lease(self, numel: int, dtype: torch.dtype, role: BufferRole) -> torch.Tensor:
        """A buffer of ``numel`` elements at a fixed address, from a ring that the backend keeps.

        Called once for each unit and role at wrap, and only where ``capabilities.fixed_addresses``. Foreign storages
        cannot be resized, so the backend decides how many units share one slot.
        """
        raise NotImplementedError(f"{type(self).__name__} does not lease buffers")

    @abstractmethod
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill ``out`` with every rank's ``shard``, in rank order.

        ``out``: shape ``[world_size * n]``, contiguous; ``shard``: shape ``[n]``, same dtype. ``shard`` may be this
        rank's own slice of ``out``, which then must not be copied.
        """

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        """Do what ``all_gather(out, shard)`` does for each of ``pairs`` in turn; one ``Work`` for all.

        The engine gathers neighbouring small units by it, and the units of one module. A backend overrides it where one
        launch of many operations takes less time than as many launches. ``pairs`` are the same on every rank, in
        number, sizes and order, and may be of several dtypes.
        """
        return _Together([self.all_gather(out, shard) for out, shard in pairs])

    @abstractmethod
    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        *,
        op: ReduceOp,
        scratch: torch.Tensor | None = None,
    ) -> Work:
        """Reduce ``full`` over ranks and keep this rank's slice.

        ``out``: shape ``[n]``; ``full``: shape ``[world_size * n]``, contiguous. With ``F_k`` the ``full`` of rank
        ``k`` and ``s`` this rank's slice, ``out = op_k(F_k[s])``. Where
        ``capabilities.widening``, ``out`` may have a wider dtype, and the accumulation then happens in it. ``full``
        may be overwritten. ``scratch``: uint8, of at least ``scratch_nbytes(...)`` bytes, or None.
        """

    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        """Do ``reduce_scatter(out, full, op=op, scratch=scratch)`` for each of ``triples``; one ``Work`` for all.

        The engine reduces neighbouring units of medium size by it, and the units of one module. A backend overrides it
        for the same reason as ``all_gather_many``. ``triples`` are the same on every rank, in number, sizes and order.
        """
        return _Together([self.reduce_scatter(out, full, op=op, scratch=scratch) for out, full, scratch in triples])

    def scratch_nbytes(self, role: BufferRole, numel: int, wire_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
        """Bytes of scratch that ``reduce_scatter`` wants for a ``full`` of ``numel`` elements; 0 for none."""
        return 0

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        """Reduce ``tensor`` (any shape, contiguous) over ranks, in place."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        """Overwrite ``tensor`` with that of group rank ``src``."""

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        """Send block ``j`` of ``input`` to rank ``j``, and receive rank ``j``'s block for this rank as block ``j``.

        ``out``: shape ``[sum(out_splits)]``, contiguous; ``input``: shape ``[sum(in_splits)]``, contiguous, same dtype,
        which may be any. They do not overlap, and ``input`` is left as it is. Blocks lie one behind the other in rank
        order, this rank's own among them. Splits count elements, one for each rank, and may be 0, all of them, too.
        ``out_splits[j]`` of rank ``i`` is ``in_splits[i]`` of rank ``j``: both know it beforehand, and it is never
        communicated. Every rank makes the call, also one that neither sends nor receives.

        Called only where ``capabilities.exchanges``.

        Raises:
            CollectiveError: splits that are not one for each rank, do not add up, or differ for this rank's own block;
                tensors of two dtypes, or not flat. Before anything is sent.
        """
        raise NotImplementedError(f"{type(self).__name__} does not exchange blocks between ranks")

    def announce(self, what: str) -> None:
        """What the engine issues next, in this group or a part of it: the same text on every rank that does the same.

        Called in every step, before its gathers and reductions, where ``capabilities.announces``. Ranks that went
        different ways, one after an exception that it caught, say, then learn of it before bytes of one unit arrive in
        another. It may wait for the other ranks, or let the operation that follows fail.

        Raises:
            RankMismatchError: ranks announced different things; on every rank, here or where it waits for what follows.
        """
        return None

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's picklable ``obj``, in rank order. Blocks; never called in a steady step."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank has arrived."""

    @abstractmethod
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Collectives:
        """The subgroup that contains this rank.

        ``rank_lists``: disjoint lists of group ranks that cover the group, the same on every rank; every rank calls
        it. Ranks within a subgroup are numbered in the order of their list.

        Called once for each model. Two parts of equal lists may share communicators: what a part holds is released
        with the last of them that is closed.
        """

    def abort(self, reason: str) -> None:
        """Give up operations in flight, here and on the ranks that can be reached. Called when this rank failed."""
        return None

    def close(self) -> None:
        """Release communicators and memory. Idempotent.

        Called by ``polyshard.close``, on every rank and in the same order, between steps: parts before the group that
        they are of. It may meet the other ranks. Never called from a finalizer, since ranks collect garbage each at
        another time: an instance that is dropped without it must not communicate. A group that the context gave stays
        open.
        """
        return None
