"""Collectives of a pretended rank on the meta device: nothing travels, and everything is noted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..interfaces import COMPLETED, BufferRole, Collectives, CollectivesCapabilities, ReduceOp, Work
from .links import Operation, Span
from .recording import Recorder

_META = torch.device("meta")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64})


class NotedCollectives(Collectives):
    """Rank 0 of ``span``. What it can do, and the scratch that it takes, are those of ``nccl``."""

    api_version = 1

    def __init__(self, recorder: Recorder, span: Span) -> None:
        self._recorder = recorder
        self._span = span

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return CollectivesCapabilities(
            devices=frozenset({"meta"}),
            dtypes=_FLOATS,
            reduce_ops=frozenset(ReduceOp),
            widening=True,
            stream_ordered=False,
            capturable=False,
            fixed_addresses=False,
            can_communicate=False,
            exchanges=True,
        )

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self._span.ranks

    @property
    def device(self) -> torch.device:
        return _META

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._note(Operation.ALL_GATHER, [out])

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return self._note(Operation.ALL_GATHER, [out for out, _ in pairs])

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        return self._note(Operation.REDUCE_SCATTER, [full])

    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        return self._note(Operation.REDUCE_SCATTER, [full for _, full, _ in triples])

    def scratch_nbytes(self, role: BufferRole, numel: int, wire_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
        return 0 if wire_dtype is out_dtype else numel * wire_dtype.itemsize

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return self._note(Operation.ALL_REDUCE, [tensor])

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return COMPLETED

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self._span.ranks

    def barrier(self) -> None:
        return None

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> NotedCollectives:
        own = next(ranks for ranks in rank_lists if 0 in ranks)
        stride = (own[1] - own[0]) * self._span.stride if len(own) > 1 else 1
        return NotedCollectives(self._recorder, Span(len(own), self._span.first, stride))

    def _note(self, operation: Operation, wholes: Sequence[torch.Tensor]) -> Work:
        if self._span.ranks > 1:
            self._recorder.transfer(operation, sum(whole.nbytes for whole in wholes), self._span, len(wholes))
        return COMPLETED
