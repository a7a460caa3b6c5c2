"""Launch plans of units over groups of their own: one order on all ranks, and few launches. No process, no tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import prod
from typing import NamedTuple

import pytest
from polyshard.planning import thresholds
from polyshard.planning.launches import Buckets, ReduceMode, alike
from polyshard.runtime.order import ExecutionOrder, Order

MESHES = 50


class Launch(NamedTuple):
    """One communication of one rank."""

    operation: str
    ranks: tuple[int, ...]
    members: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """Units that are cut alike: dense ones, experts, and parts of tensor parallelism."""

    shard: tuple[int, ...]
    """Dimensions of the mesh along which they are cut."""
    replicate: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Unit:
    """A unit as launches see it, on all ranks alike."""

    name: str
    kind: Kind
    numel: int
    kept: bool
    """Whether it stays gathered between forward and backward."""


class Module:
    """A module state on one rank."""

    is_split = False

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.launch_nbytes = sum(unit.numel * unit.kind.itemsize for unit in units)


class Mesh:
    """Ranks in rows of several dimensions."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.places = list(product(*map(range, shape)))
        self._groups: dict[tuple[int, frozenset[int]], tuple[int, ...]] = {}

    def ranks(self, rank: int, along: Sequence[int]) -> tuple[int, ...]:
        """Those that differ from ``rank`` along some of the dimensions ``along`` alone."""
        key = rank, frozenset(along)
        if key not in self._groups:
            kept = [dim for dim in range(len(self.shape)) if dim not in along]
            mine = [self.places[rank][dim] for dim in kept]
            self._groups[key] = tuple(
                other for other, place in enumerate(self.places) if [place[dim] for dim in kept] == mine
            )
        return self._groups[key]


@dataclass(frozen=True)
class Model:
    """A random model on a random mesh, and how it is launched."""

    mesh: Mesh
    modules: tuple[tuple[Unit, ...], ...]
    ahead: tuple[int, int]
    limit: int


def random_model(seed: int) -> Model:
    """A mesh of two to four dimensions and up to 64 ranks, and modules of units over two to four kinds of groups."""
    draw = random.Random(seed)
    shape = [draw.choice((2, 2, 2, 3, 4, 8)) for _ in range(draw.randint(2, 4))]
    while prod(shape) > 64:
        shape[shape.index(max(shape))] //= 2
    if draw.random() < 0.1:
        shape[0] = 1
    mesh = Mesh(shape)
    kinds = []
    for _ in range(draw.randint(2, 4)):
        dims = draw.sample(range(len(shape)), len(shape))
        cut = draw.randint(1, len(dims))
        # Replicas, or other parts, along the rest.
        replicated = draw.randint(cut, len(dims))
        kinds.append(Kind(tuple(dims[:cut]), tuple(dims[cut:replicated]), draw.choice((2, 4))))
    largest = draw.choice((200, 2000, 20000))

    def unit(name: str) -> Unit:
        kind = draw.choice(kinds)
        return Unit(name, kind, draw.choice((0, draw.randint(1, largest))), draw.random() < 0.2)

    modules = tuple(
        tuple(unit(f"{index}.{which}") for which in range(draw.choice((1, 1, 2, 3))))
        for index in range(draw.randint(3, 12))
    )
    return Model(mesh, modules, (draw.randint(0, 2), draw.randint(0, 2)), draw.choice((0, 2000, 20000, 200000)))


def launches_of(model: Model, rank: int) -> list[Launch]:
    """What ``rank`` issues in two steps: one that records the order, and one that follows it."""
    issued: list[Launch] = []
    units = [unit for each in model.modules for unit in each]
    modules = [Module(each) for each in model.modules]
    order: ExecutionOrder[Module] = ExecutionOrder(*model.ahead, model.limit)
    buckets: Buckets[Unit] = Buckets(model.limit)
    mesh = model.mesh
    groups = {unit.kind: (mesh.ranks(rank, unit.kind.shard), mesh.ranks(rank, unit.kind.replicate)) for unit in units}
    gathered: set[Unit] = set()

    def gather(due: Sequence[Unit]) -> None:
        due = [unit for unit in due if unit not in gathered and len(groups[unit.kind][0]) > 1]
        for same in alike(due, [groups[unit.kind][0] for unit in due]):
            issued.append(Launch("gather", groups[same[0].kind][0], tuple(unit.name for unit in same)))
        gathered.update(due)

    def fetch(module: Module, batches: Sequence[Sequence[Module]]) -> None:
        gather(module.units)
        for batch in batches:
            if any(unit not in gathered for unit in batch[0].units):
                gather(list(dict.fromkeys(unit for each in batch for unit in each.units)))

    def reduce(members: Sequence[Unit]) -> None:
        for operation, ranks in zip(("reduce", "add up"), groups[members[0].kind], strict=True):
            if len(ranks) > 1:
                issued.append(Launch(operation, ranks, tuple(unit.name for unit in members)))

    for _ in range(2):
        order.begin_forward()
        for module in modules:
            fetch(module, order.enter(module))
            gathered.difference_update(unit for unit in module.units if not unit.kept)
        order.end_forward()
        backward = Order(modules[::-1], order.backward_ahead, order.batch_nbytes)
        for module, batches in zip(backward.module_states, backward.behind, strict=True):
            fetch(module, batches)
            gathered.difference_update(module.units)
            for same in alike(module.units, [unit.kind for unit in module.units]):
                kind = same[0].kind
                nbytes = [unit.numel * kind.itemsize for unit in same]
                mode = buckets.mode_of_module(nbytes, len(groups[kind][0]) > 1)
                for bucket in buckets.put(kind, same, sum(nbytes), mode):
                    reduce(bucket.members)
        for bucket in buckets.close():
            reduce(bucket.members)
    return issued


def disagreement(model: Model) -> str:
    """Two ranks that come to communications of two groups, or of one, in different orders; empty where none do."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, list[Launch]]] = {}
    for rank in range(len(model.mesh.places)):
        issued = launches_of(model, rank)
        for pair in combinations_with_replacement(sorted({launch.ranks for launch in issued}), 2):
            mine = [launch for launch in issued if launch.ranks in pair]
            other, theirs = first.setdefault(pair, (rank, mine))
            if mine != theirs:
                return f"ranks {other} and {rank}: {theirs} and {mine}"
    return ""


@pytest.mark.slow
def test_all_ranks_that_share_groups_launch_in_one_order() -> None:
    overlapping = 0
    for seed in range(MESHES):
        model = random_model(seed)
        assert disagreement(model) == "", f"seed {seed}, mesh {model.mesh.shape}"
        overlapping += len({launch.ranks for launch in launches_of(model, 0)}) > 1
    assert overlapping > 40


def reductions(kinds: str, nbytes: int, limit: int) -> list[str]:
    """The launches of units of ``kinds``, a letter each, all of ``nbytes``, in one backward."""
    buckets: Buckets[str] = Buckets(limit)
    issued = []
    for kind in kinds:
        issued += buckets.put(kind, [kind], nbytes, buckets.mode_of(nbytes, True))
    return ["".join(bucket.members) for bucket in [*issued, *buckets.close()]]


def test_what_is_left_is_issued_in_the_order_in_which_it_was_opened() -> None:
    assert reductions("edde", 1024, limit=2**20) == ["ee", "dd"]
    # The first bucket is full, and opened anew behind the other.
    assert reductions("eeeede", 1024, limit=4 * 1024) == ["eeee", "d", "e"]


def test_no_more_buckets_wait_than_the_limit_says() -> None:
    kinds = "abcdef"
    # The one that was opened first makes room for the fifth, the second for the sixth.
    assert reductions(kinds + "f", 1024, limit=2**20) == ["a", "b", "c", "d", "e", "ff"]
    assert thresholds.OPEN_BUCKETS == 4
    buckets: Buckets[str] = Buckets(2**20)
    due = [[each.members for each in buckets.put(kind, [kind], 1024, ReduceMode.MERGED)] for kind in kinds]
    assert due == [[], [], [], [], [["a"]], [["b"]]]
