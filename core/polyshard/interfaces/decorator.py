"""The base of collectives that change what others do: that compress, count, slow down."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from .collectives import BufferRole, Collectives, CollectivesCapabilities, ReduceOp, Work

#: What a decorator may override, and what does the same many times over: that must not go past it.
_MANY = {"all_gather": "all_gather_many", "reduce_scatter": "reduce_scatter_many"}


class CollectivesDecorator(Collectives):
    """Collectives around others, named in the configuration: ``{"name": "compressed", "inner": "nccl"}``.

    Everything goes on to ``inner``; a subclass overrides what it changes. Its factory makes the inner ones by
    ``context.construct(Group.COLLECTIVES, inner)``, so that ranks compare these, too. ``around``
    says how a part of the ranks is decorated::

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

    A subclass that overrides ``all_gather`` or ``reduce_scatter`` alone is asked once for each operation: the ``_many``
    of the inner ones would go past it. Where it changes what an operation needs (memory from ``lease``, capture,
    streams), it says so in ``capabilities``.
    """

    inner: Collectives
    """What does the work."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for one, many in _MANY.items():
            if one in cls.__dict__ and many not in cls.__dict__:
                setattr(cls, many, getattr(Collectives, many))

    @abstractmethod
    def around(self, inner: Collectives) -> Collectives:
        """The same decorator, with its settings, around ``inner``: a part of the ranks."""

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return self.inner.capabilities

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def process_group(self) -> Any | None:
        return self.inner.process_group

    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        return self.inner.allocation(role, nbytes)

    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        self.inner.prepare_capture(stream, like)

    def lease(self, numel: int, dtype: torch.dtype, role: BufferRole) -> torch.Tensor:
        return self.inner.lease(numel, dtype, role)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self.inner.all_gather(out, shard)

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return self.inner.all_gather_many(pairs)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        *,
        op: ReduceOp,
        scratch: torch.Tensor | None = None,
    ) -> Work:
        return self.inner.reduce_scatter(out, full, op=op, scratch=scratch)

    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        return self.inner.reduce_scatter_many(triples, op=op)

    def scratch_nbytes(self, role: BufferRole, numel: int, wire_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
        return self.inner.scratch_nbytes(role, numel, wire_dtype, out_dtype)

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return self.inner.all_reduce(tensor, op=op)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return self.inner.broadcast(tensor, src)

    def all_to_all(
        self, out: torch.Tensor, out_splits: Sequence[int], input: torch.Tensor, in_splits: Sequence[int]
    ) -> Work:
        return self.inner.all_to_all(out, out_splits, input, in_splits)

    def announce(self, what: str) -> None:
        self.inner.announce(what)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.inner.all_gather_object(obj)

    def barrier(self) -> None:
        self.inner.barrier()

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Collectives:
        return self.around(self.inner.partition(rank_lists))

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()
