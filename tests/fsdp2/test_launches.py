"""What one ``fully_shard`` call sharded is gathered by one launch, and reduced by one: each parameter is a unit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import polyshard
import polyshard_fsdp2._settings
import pytest
import torch
from fsdp2_models import OURS, PACKAGES, Words, batches, cpu_mesh, loss_of, shard_all
from parity import chain, draw, fake, root_of, seeded, units_of
from polyshard.interfaces import Observer, UnitEvent, UnitOperation, UnitSpec
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.gloo import GlooCollectives
from processes import KeptRanks
from torch import nn
from torch.profiler import ProfilerActivity, profile

BLOCKS = 4
WIDTH = 8


class Block(nn.Module):
    """Nine parameters, as a transformer block has."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.before(x)
        x = x + self.out(self.query(inner) * self.key(inner) + self.value(inner))
        hidden: torch.Tensor = x + self.down(torch.relu(self.up(self.behind(x))))
        return hidden


def made() -> Any:
    """Blocks of nine parameters, and two of the root."""
    return chain(blocks=nn.Sequential(*(Block() for _ in range(BLOCKS))), head=nn.Linear(WIDTH, 3))


class Launches(NamedTuple):
    """How many gathers each launch of several had, in order, and how many went alone; the same of reductions."""

    gathered: list[int]
    gathered_alone: int
    reduced: list[int]
    reduced_alone: int


def launches_of(
    model: nn.Module, inside: type[nn.Module], steps: int, batch_nbytes: int | str, offload: str = "none"
) -> list[Launches]:
    """Of each of so many steps, on one of four pretended ranks, where each module of type ``inside`` is a group."""
    collectives = fake()
    settings = {"split_root": False, "batch_nbytes": batch_nbytes, "offload": offload}
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=units_of(inside), **settings))
    assert sum(len(unit.parameters) for unit in root_of(model).units) == len(list(model.parameters()))
    found = []
    for _ in range(steps):
        collectives.calls.clear()
        collectives.batches.clear()
        collectives.reduction_batches.clear()
        model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean().backward()
        counts = Counter(call.operation for call in collectives.calls)
        gathered, reduced = list(collectives.batches), list(collectives.reduction_batches)
        alone = counts["all_gather"] - sum(gathered), counts["reduce_scatter"] - sum(reduced)
        found.append(Launches(gathered, alone[0], reduced, alone[1]))
    return found


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_large_groups_are_one_launch_each_in_every_step(offload: str) -> None:
    # As many as FSDP2 issues: each block in forward and in backward, the root once; and each once behind its backward,
    # by one communication.
    blocks = [9] * BLOCKS
    expected = Launches([2, *blocks, *blocks], 0, [], BLOCKS + 1)
    # No block leaves room for another one.
    assert launches_of(seeded(made), Block, 2, 1, offload) == [expected, expected]


def test_small_groups_share_launches() -> None:
    first, second = launches_of(seeded(made), Block, 2, batch_nbytes="128 MiB")
    # No order is known in the first forward. All gradients are merged, and travel as one.
    assert first == Launches([2, 9, 9, 9, 9, 9 * BLOCKS], 0, [], 1)
    assert second == Launches([2, 9 * BLOCKS, 9 * BLOCKS], 0, [], 1)


@pytest.mark.parametrize(("room", "reductions"), [(2, 3), (1, 5)])
def test_groups_of_medium_size_share_reductions(room: int, reductions: int) -> None:
    # Weights and biases; a weight is more than a quarter of the room for two, and so is not merged.
    nbytes = 8 * (WIDTH * WIDTH + WIDTH)
    model = seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))))
    (found,) = launches_of(model, nn.Linear, 1, batch_nbytes=room * nbytes)
    assert (found.reduced, found.reduced_alone) == ([], reductions)


def test_replicas_add_up_a_group_by_one_reduction() -> None:
    collectives = fake()
    model = seeded(made)
    settings = {"split_root": False, "batch_nbytes": 1, "strategy": "hybrid_shard"}
    config = polyshard.ShardConfig(collectives=collectives, policy=units_of(Block), shard_size=2, **settings)
    polyshard.shard(model, config)
    model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean().backward()
    replicas = root_of(model).units[0].ranks.replicate
    assert isinstance(replicas, FakeCollectives)
    assert [call.operation for call in replicas.calls] == ["all_reduce"] * (BLOCKS + 1)


class Gathered:
    """Bytes of whole parameters that are there at once, at most."""

    def __init__(self, nbytes: dict[str, int]) -> None:
        self.nbytes, self.now, self.peak = nbytes, 0, 0

    @polyshard.hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer:
        return self.observe

    def observe(self, event: UnitEvent) -> None:
        nbytes = sum(self.nbytes[name] for name in event.unit.parameter_names)
        if event.operation is UnitOperation.RELEASE:
            self.now -= nbytes
        elif event.operation is UnitOperation.GATHER and event.begins:
            self.now += nbytes
            self.peak = max(self.peak, self.now)


@pytest.mark.parametrize("batch_nbytes", [1, "128 MiB"])
def test_the_report_counts_groups(batch_nbytes: int | str) -> None:
    model = seeded(made)
    gathered = Gathered({name: 8 * parameter.numel() for name, parameter in model.named_parameters()})
    collectives = {"name": "fake", "world_size": 2}
    settings = {"split_root": False, "batch_nbytes": batch_nbytes, "listeners": [gathered]}
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=units_of(Block), **settings))
    for _ in range(2):
        model(draw(2, WIDTH)).square().mean().backward()
    report = polyshard.report(model)
    assert gathered.peak <= report.gathered_nbytes <= 1.2 * gathered.peak
    block = 8 * sum(parameter.numel() for parameter in Block().parameters())
    # One block's inputs while another's travel; of small ones the bucket, and what it was copied from.
    assert report.reduction_nbytes >= 2 * block


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """What the engine issues through gloo inside: launches, not what they consist of."""
    counts: Counter[str] = Counter()
    inside: list[str] = []

    def counted(name: str, method: Any) -> Any:
        def call(self: GlooCollectives, *args: Any, **options: Any) -> Any:
            if not inside:
                counts[name] += 1
                counts[f"gathers among {self.world_size}"] += name in ("all_gather", "all_gather_many")
            inside.append(name)
            try:
                return method(self, *args, **options)
            finally:
                inside.pop()

        return call

    names = ("all_gather", "all_gather_many", "reduce_scatter", "reduce_scatter_many", "announce", "all_gather_object")
    patches = [patch.object(GlooCollectives, name, counted(name, getattr(GlooCollectives, name))) for name in names]
    for each in patches:
        each.start()
    try:
        yield counts
    finally:
        for each in patches:
            each.stop()


def _issued(
    package: ModuleType, shard: Callable[[ModuleType, Any], Any] = shard_all, kind: type[Words] = Words
) -> tuple[int, int]:
    """Gathers and reductions of a second step."""
    torch.manual_seed(0)
    first, second = batches(2)
    with counting() as counts:
        model = shard(package, kind(blocks=BLOCKS))
        loss_of(model, first).backward()
        counts.clear()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            loss_of(model, second).backward()
    if package is OURS:
        gathers = counts["all_gather"] + counts["all_gather_many"]
        return gathers, counts["reduce_scatter"] + counts["reduce_scatter_many"]
    issued = {event.key: event.count for event in profiled.key_averages() if event.key.startswith("c10d::")}
    return issued["c10d::_allgather_base_"], issued["c10d::_reduce_scatter_base_"]


def _beside_fsdp2(rank: int) -> None:
    theirs, ours = (_issued(package) for package in PACKAGES)
    # Blocks and the embedding in forward and backward, the root once.
    assert theirs == (2 * (BLOCKS + 1) + 1, BLOCKS + 2)
    # The root, the rest of forward, and the blocks in backward, which needs no embedding; everything's gradients.
    assert ours == (3, 1)


def test_fewer_launches_than_fsdp2_issues(ranks: KeptRanks) -> None:
    ranks.run(2, _beside_fsdp2)


class Placed(Words):
    """Has an embedding of places, too."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks=blocks)
        self.places = nn.Embedding(5, self.embedding.embedding_dim)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _in_lists(package: ModuleType, model: Words) -> Any:
    first, second, *others = model.blocks
    if isinstance(model, Placed):
        package.fully_shard([model.embedding, model.places], mesh=cpu_mesh())
    for modules in ([first, second], others, [model.norm, model.head]):
        package.fully_shard(modules, mesh=cpu_mesh(), reshard_after_forward=True)
    return package.fully_shard(model, mesh=cpu_mesh())


def _lists_beside_fsdp2(rank: int) -> None:
    # No group leaves room for another one.
    alone = functools.partial(polyshard.ShardConfig, batch_nbytes=1)
    with patch.object(polyshard_fsdp2._settings, "ShardConfig", alone):
        theirs, ours = (_issued(package, _in_lists) for package in PACKAGES)
        embedded = _issued(OURS, _in_lists, Placed)
    # Three lists in forward and in backward, the root with the embedding once; each once behind its backward.
    assert theirs == ours == (2 * 3 + 1, 3 + 1)
    # A list of embeddings in forward alone.
    assert embedded == (2 * 3 + 1, 3 + 1)


def test_a_list_is_one_launch(ranks: KeptRanks) -> None:
    ranks.run(2, _lists_beside_fsdp2)


def _among_neighbours(rank: int) -> None:
    torch.manual_seed(0)
    first, second = batches(2)
    with counting() as counts:
        model = shard_all(OURS, Words(blocks=BLOCKS), reshard_after_forward=2)
        loss_of(model, first).backward()
        counts.clear()
        loss = loss_of(model, second)
        # The root, and the rest.
        assert (counts["gathers among 4"], counts["gathers among 2"]) == (2, 0)
        loss.backward()
        # The same, less the embedding: what each call formed is one group.
        assert (counts["gathers among 4"], counts["gathers among 2"]) == (2, 2)
        assert counts["reduce_scatter"] + counts["reduce_scatter_many"] == 1


def test_groups_of_neighbours_share_launches(ranks: KeptRanks) -> None:
    ranks.run(4, _among_neighbours)
