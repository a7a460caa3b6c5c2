"""A stranger's package, written from the contracts alone, is found by name and trains a model right."""

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
from polyshard import hookimpl
from polyshard.errors import CollectiveTimeoutError
from polyshard.interfaces import (
    COMPLETED, Arrangement, Collectives, CollectivesCapabilities, Layout, Listener, OffloadCapabilities, OffloadManager,
    PrecisionCapabilities, PrecisionCaster, ReduceOp, UnitDtypes, WireSpec, WrapPolicy,
)

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


class Backwards(Layout):
    """The last parameter first."""

    api_version = 1

    def __init__(self, context):
        pass

    def arrange(self, unit):
        order, offsets, end = tuple(reversed(range(len(unit.parameters)))), [], 0
        for index in order:
            offsets.append(-(-end // unit.alignment) * unit.alignment)
            end = offsets[-1] + unit.parameters[index].numel
        return [Arrangement(order, tuple(offsets), unit.aligned_slice(-(-end // unit.shards)))]


class Scrambled(PrecisionCaster):
    """Computes in the masters' dtype, and takes inputs of any; parameters travel scrambled, with a checksum."""

    api_version = 1

    capabilities = PrecisionCapabilities(encodes=True)

    def __init__(self, context, key=0):
        self._key = key
        self.steps = 0

    def dtypes(self, unit):
        master = unit.master_dtype
        return UnitDtypes(compute=master, wire=master, reduce=master, grad=master)

    def input_cast(self, unit):
        def cast(args, kwargs):
            fits = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point()
            return tuple(value.to(unit.master_dtype) if fits(value) else value for value in args), kwargs
        return cast

    def prepare(self, units, collectives):
        self.steps += 1

    def wire(self, unit):
        return WireSpec(-(-(unit.shard_numel * unit.master_dtype.itemsize + 1) // 16) * 16)

    def encode(self, unit, wire, shard):
        data = shard.contiguous().view(torch.uint8)
        wire[: data.numel()] = data ^ self._key
        wire[-1] = data.sum(dtype=torch.int64) % 251

    def decode(self, unit, wire, out):
        nbytes = unit.shard_numel * unit.master_dtype.itemsize
        for row, letter in zip(out, wire):
            data = letter[:nbytes] ^ self._key
            assert data.sum(dtype=torch.int64) % 251 == letter[-1]
            row.copy_(data.view(unit.master_dtype))


class Shelf(OffloadManager):
    """Keeps masters and gradients in memory of its own."""

    api_version = 1

    def __init__(self, context):
        self.shelf = {}
        self.owed = []
        self.syncs = 0

    capabilities = property(lambda self: OffloadCapabilities(parks=True))

    def place(self, unit, shard):
        self.shelf[unit.name, unit.parameter_names] = shard.clone()
        return self.shelf[unit.name, unit.parameter_names]

    def fetch(self, unit, master, own_slice):
        own_slice.copy_(master)

    def store_grad(self, unit, grad, into):
        parked = torch.empty_like(grad) if into is None else into
        self.owed.append((parked, grad, into is not None))
        return parked

    def sync_for_step(self):
        self.syncs += 1
        for parked, grad, adds in self.owed:
            parked.add_(grad) if adds else parked.copy_(grad)
        self.owed.clear()


def count(counts, key):
    with LOCK:
        counts[key] = counts.get(key, 0) + 1


class Counter:
    """Counts what one unit does."""

    def __init__(self, counts):
        self._counts = counts

    def _count(self, what, unit):
        count(self._counts, (what, unit.name))

    def unshard(self, unit): self._count("unshard", unit)
    def unsharded(self, unit): self._count("unsharded", unit)
    def compute(self, unit, backward): self._count("backward" if backward else "forward", unit)
    def computed(self, unit, backward): self._count("backward ended" if backward else "forward ended", unit)
    def wait(self, unit): self._count("wait", unit)
    def waited(self, unit): self._count("waited", unit)
    def reduce(self, unit): self._count("reduce", unit)
    def reduced(self, unit): self._count("reduced", unit)
    def reshard(self, unit): self._count("reshard", unit)


class Tally(Listener):
    """Counts steps, and what units do in them, under a name that the test knows."""

    api_version = 1

    COUNTS = {}

    def __init__(self, context, under):
        self.counts = self.COUNTS.setdefault(under, {})

    @hookimpl
    def step_begin(self): count(self.counts, "begin")

    @hookimpl
    def step_end(self): count(self.counts, "end")

    @hookimpl
    def make_observer(self, unit): return Counter(self.counts)
'''

ENTRY_POINTS = [
    ("polyshard.collectives", "mail", "acme_shard:Mail"),
    ("polyshard.policies", "odd", "acme_shard:Odd"),
    ("polyshard.layouts", "backwards", "acme_shard:Backwards"),
    ("polyshard.precision", "scrambled", "acme_shard:Scrambled"),
    ("polyshard.offload", "shelf", "acme_shard:Shelf"),
    ("polyshard.plugins", "tally", "acme_shard:Tally"),
]

RUN = """
[shard]
policy = "odd"
offload = "shelf"
layout = "backwards"
strategy = "full_shard"
timeout_s = 10.0

[shard.collectives]
name = "mail"
box = "from a file"
rank = 0
size = 3

[shard.precision]
name = "scrambled"
key = 90

[[shard.listeners]]
name = "tally"
under = "from a file"
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The installed package's module."""
    install(tmp_path, "acme-shard", "3.2", ENTRY_POINTS, {"acme_shard": SOURCE})
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("acme_shard")
    del sys.modules["acme_shard"]


def trained(config: ShardConfig, model: nn.Module, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    polyshard.shard(model, config)
    model.register_forward_pre_hook(lambda module, args: (args[0].to(dtype),), prepend=True)
    optimizer = adam(model)
    for turn in range(5):
        square_step(model, turn, rank)
        assert root_of(model).gathered == ()
        optimizer.step()
        optimizer.zero_grad()
    with polyshard.unsharded(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_trained(model: nn.Module, ranks: list[dict[str, torch.Tensor]], step: Any = square_step) -> None:
    expected = train_reference(model, step, len(ranks), 5, adam).parameters
    for whole in ranks:
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


def narrow_input_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    """The reference for inputs that arrive in fp32."""
    hook = model.register_forward_pre_hook(lambda module, args: (args[0].float().double(),))
    try:
        return square_step(model, turn, rank)
    finally:
        hook.remove()


@pytest.mark.slow
def test_everything_comes_from_one_package_named_in_a_file(acme: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        environ = {"POLYSHARD_COLLECTIVES__RANK": str(rank)}
        return trained(ShardConfig.from_toml(file, environ=environ), mine, rank, torch.float32)

    assert_trained(model, on_ranks(3, on_rank), narrow_input_step)
    # Three ranks, five steps each; blocks.1 is the one that the policy chose.
    counts = acme.Tally.COUNTS["from a file"]
    assert counts["begin"] == counts["end"] == 15
    # Gathered for forward and again for backward; the root is kept between them.
    assert counts["unshard", "blocks.1"] == counts["reshard", "blocks.1"] == 30
    assert counts["unshard", ""] == counts["reshard", ""] == 15
    for what in ("forward", "forward ended", "backward", "backward ended", "reduce", "reduced"):
        assert counts[what, "blocks.1"] == counts[what, ""] == 15
    assert counts["unsharded", "blocks.1"] == 30
    assert counts["unsharded", ""] == 15
    # For its gather, and for room for its reduction.
    for name in ("blocks.1", ""):
        assert counts["wait", name] == counts["waited", name] == counts["unshard", name] + 15


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
        return trained(config, mine, rank, torch.float64)

    assert_trained(model, on_ranks(4, on_rank))
