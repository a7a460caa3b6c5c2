"""Collectives of a stranger, written from the contract alone, serve every strategy; tests/examples/test_acme.py has the
plugins of the other groups.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from parity import Net, adam, on_ranks, root_of, seeded, square_step, train_reference
from polyshard import ShardConfig
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

#: Imports the contracts and the errors, and nothing else of polyshard.
SOURCE = '''
"""Plugins of the pretended company Acme."""

import pickle
import threading

import torch
from polyshard.errors import CollectiveTimeoutError
from polyshard.interfaces import COMPLETED, Collectives, CollectivesCapabilities, ReduceOp, WrapPolicy

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


class Odd(WrapPolicy):
    """Every module below the root whose name ends in an odd number."""

    api_version = 1

    def __init__(self, context):
        pass

    def plan(self, root, context):
        return {
            module: {} for name, module in root.named_modules()
            if name and name[-1].isdigit() and int(name[-1]) % 2 and module not in context.ignored_modules
        }
'''

ENTRY_POINTS = [("polyshard.collectives", "mail", "acme_shard:Mail"), ("polyshard.policies", "odd", "acme_shard:Odd")]


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The installed package's module."""
    install(tmp_path, "acme-shard", "3.2", ENTRY_POINTS, {"acme_shard": SOURCE})
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("acme_shard")
    del sys.modules["acme_shard"]


def trained(config: ShardConfig, model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    polyshard.shard(model, config)
    optimizer = adam(model)
    for turn in range(5):
        square_step(model, turn, rank)
        assert root_of(model).gathered == ()
        optimizer.step()
        optimizer.zero_grad()
    with polyshard.unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "static"),
    [
        ({"strategy": "full_shard"}, True),
        ({"strategy": "shard_grad_op"}, False),
        ({"strategy": "no_shard"}, True),
        ({"strategy": "hybrid_shard", "shard_size": 2}, False),
    ],
    ids=str,
)
def test_its_collectives_serve_every_strategy(acme: Any, settings: dict[str, Any], static: bool) -> None:
    model = seeded(Net)
    box = f"{settings['strategy']}, {static}"

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        collectives = {"name": "acme-shard:mail", "box": box, "rank": rank, "size": 4, "static": static}
        config = ShardConfig(collectives=collectives, policy="odd", timeout_s=10.0, **settings)
        return trained(config, mine, rank)

    expected = train_reference(model, square_step, 4, 5, adam).parameters
    for whole in on_ranks(4, on_rank):
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)
