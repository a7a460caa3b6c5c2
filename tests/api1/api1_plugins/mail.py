"""Ranks in one process that write each other letters, written against version 1 of the collectives' contract."""

import pickle
import threading

import torch
from polyshard.errors import CollectiveTimeoutError
from polyshard.interfaces import COMPLETED, Collectives, CollectivesCapabilities, ReduceOp

BOXES = {}
LOCK = threading.Lock()


class Box:
    """Where the ranks of one group put what they send."""

    def __init__(self, size, timeout):
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.letters = {}

    def exchange(self, rank, letter):
        self.letters[rank] = letter
        try:
            self.barrier.wait()
            received = [self.letters[each] for each in sorted(self.letters)]
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise CollectiveTimeoutError(f"rank {rank} waited in vain") from None
        return received


class Mail(Collectives):
    """Ranks in one process that write each other letters. Every operation is done when it returns."""

    api_version = 1

    def __init__(self, context, box, rank, size, static=False):
        self._context, self._name, self._rank, self._size, self._static = context, box, rank, size, static
        with LOCK:
            self._box = BOXES.setdefault((box, size), Box(size, context.timeout.total_seconds()))

    @property
    def capabilities(self):
        return CollectivesCapabilities(
            devices=frozenset({"cpu"}), dtypes=frozenset({torch.float32, torch.float64}),
            reduce_ops=frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX}), widening=False, stream_ordered=False,
            capturable=False, fixed_addresses=self._static, can_communicate=True,
        )

    rank = property(lambda self: self._rank)
    world_size = property(lambda self: self._size)
    device = property(lambda self: self._context.device)

    def lease(self, numel, dtype, role):
        assert self._static
        return torch.empty(numel, dtype=dtype)

    def all_gather(self, out, shard):
        for row, letter in zip(out.view(self._size, -1), self._box.exchange(self._rank, shard.clone())):
            row.copy_(letter)
        return COMPLETED

    def reduce_scatter(self, out, full, *, op, scratch=None):
        assert out.dtype == full.dtype
        letters = self._box.exchange(self._rank, full.clone())
        rows = torch.stack([letter.view(self._size, -1)[self._rank] for letter in letters])
        out.copy_(self._reduced(rows, op))
        return COMPLETED

    def all_reduce(self, tensor, *, op):
        letters = self._box.exchange(self._rank, tensor.clone())
        tensor.copy_(self._reduced(torch.stack(letters), op))
        return COMPLETED

    def _reduced(self, rows, op):
        if op is ReduceOp.MAX:
            return rows.amax(0)
        return rows.sum(0) / (self._size if op is ReduceOp.MEAN else 1)

    def broadcast(self, tensor, src):
        tensor.copy_(self._box.exchange(self._rank, tensor.clone())[src])
        return COMPLETED

    def all_gather_object(self, obj):
        return [pickle.loads(letter) for letter in self._box.exchange(self._rank, pickle.dumps(obj))]

    def barrier(self):
        self._box.exchange(self._rank, None)

    def partition(self, rank_lists):
        mine = next(ranks for ranks in rank_lists if self._rank in ranks)
        box = f"{self._name}/{mine}"
        return Mail(self._context, box, list(mine).index(self._rank), len(mine), self._static)
