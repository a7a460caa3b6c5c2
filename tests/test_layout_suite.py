"""The suite for layouts passes for those that come with polyshard, and fails for each way of breaking the contract."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from mixed_model import Halves
from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry
from polyshard.testing import LayoutSuite
from polyshard_layouts.blocks import Blocks
from polyshard_layouts.flat import Flat
from polyshard_layouts.rows import Rows

CONTEXT = PluginContext("under test", torch.device("cpu"))


class TestFlat(LayoutSuite):
    def make(self) -> Layout:
        return Flat(CONTEXT)


class TestRows(LayoutSuite):
    def make(self) -> Layout:
        return Rows(CONTEXT)


class TestBlocks(LayoutSuite):
    def make(self) -> Layout:
        return Blocks(CONTEXT)


@pytest.mark.slow
class TestSmallBlocks(LayoutSuite):
    def make(self) -> Layout:
        return Blocks(CONTEXT, size=48, smallest=0)


@pytest.mark.slow
class TestTiles(LayoutSuite):
    def make(self) -> Layout:
        return Blocks(CONTEXT, size=[32, 32])


@pytest.mark.slow
class TestSeveralBuffers(LayoutSuite):
    def make(self) -> Layout:
        return Halves()


Change = Callable[[UnitGeometry, Arrangement], Any]


class Faulty(Layout):
    """``flat`` but for one fault, made in units that it has no reason to."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        (right,) = Flat(CONTEXT).arrange(unit)
        found: Any = self._change(unit, right)
        return found if isinstance(found, list) else [found]


def with_(**fields: Callable[[UnitGeometry, Arrangement], Any]) -> Change:
    return lambda unit, right: dataclasses.replace(right, **{k: v(unit, right) for k, v in fields.items()})


def last_overlaps(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    before = right.offsets[-1] - unit.alignment
    return dataclasses.replace(right, offsets=(*right.offsets[:-1], max(0, before)))


def cut_short(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return dataclasses.replace(right, shard_numel=sum(each.numel for each in unit.parameters) // unit.shards)


def backwards(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return dataclasses.replace(right, order=right.order[::-1], offsets=right.offsets[::-1])


def dense(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    sizes = [each.numel for each in unit.parameters]
    return dataclasses.replace(right, offsets=tuple(itertools.accumulate(sizes, initial=0))[:-1])


def all_by_rows(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return dataclasses.replace(right, by_rows=frozenset(right.order))


class Counting:
    """Answers more padding with each question."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, unit: UnitGeometry, right: Arrangement) -> Arrangement:
        self._count += 1
        return dataclasses.replace(right, shard_numel=unit.aligned_slice(right.shard_numel + self._count))


def at_random(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    size = unit.aligned_slice(right.shard_numel + int(torch.randint(1000, ())))
    return dataclasses.replace(right, shard_numel=size)


def by_identity(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return dataclasses.replace(right, shard_numel=unit.aligned_slice(right.shard_numel + id(unit) % 100_003))


def renaming(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    object.__setattr__(unit, "name", "mine")
    return right


def by_tensors(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    total = int(torch.tensor([each.numel for each in unit.parameters]).sum())
    assert total >= 0
    return right


def never(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    while True:
        pass


def element_by_element(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    for _ in range(sum(each.numel for each in unit.parameters)):
        pass
    return right


TYPES = LayoutSuite.test_answers_are_plain_numbers_in_the_types_of_the_contract
ONCE = LayoutSuite.test_every_parameter_lies_in_one_buffer_once
OVERLAP = LayoutSuite.test_parameters_do_not_overlap_and_lie_in_the_order_that_is_told
SLICES = LayoutSuite.test_slices_hold_every_parameter_to_its_end
ALIGNED = LayoutSuite.test_parameters_begin_at_multiples_of_the_alignment
ALIGNED_SLICES = LayoutSuite.test_slices_are_aligned
ROWS = LayoutSuite.test_what_is_cut_by_rows_has_whole_rows_in_every_slice
AGAIN = LayoutSuite.test_asking_again_gives_the_same_answer
ALIKE = LayoutSuite.test_every_rank_gets_the_same_answer
UNCHANGED = LayoutSuite.test_the_unit_is_left_as_it_was
ARITHMETIC = LayoutSuite.test_it_is_arithmetic_alone
SOON = LayoutSuite.test_it_ends_soon

FAULTS: dict[str, tuple[Change, Callable[[LayoutSuite], None]]] = {
    "one beside a sequence": (lambda unit, right: [right, 0], TYPES),
    "offsets in a list": (with_(offsets=lambda u, a: list(a.offsets)), TYPES),
    "a float": (with_(shard_numel=lambda u, a: float(a.shard_numel)), TYPES),
    "rows in a set": (with_(by_rows=lambda u, a: set()), TYPES),
    "too few offsets": (with_(offsets=lambda u, a: a.offsets[1:]), TYPES),
    "one missing": (with_(order=lambda u, a: a.order[1:], offsets=lambda u, a: a.offsets[1:]), ONCE),
    "one twice": (lambda unit, right: [right, right], ONCE),
    "an overlap": (last_overlaps, OVERLAP),
    "backwards": (backwards, OVERLAP),
    "too short": (cut_short, SLICES),
    "misaligned": (dense, ALIGNED),
    "misaligned slices": (with_(shard_numel=lambda u, a: a.shard_numel + 1), ALIGNED_SLICES),
    "rows that are cut": (all_by_rows, ROWS),
    "rows of others": (with_(by_rows=lambda u, a: frozenset({len(u.parameters)})), ROWS),
    "a memory": (Counting(), AGAIN),
    "random numbers": (at_random, ALIKE),
    "which object it is": (by_identity, ALIKE),
    "another name": (renaming, UNCHANGED),
    "tensors": (by_tensors, ARITHMETIC),
    "no end": (never, SOON),
    "elements one by one": (element_by_element, SOON),
}


@pytest.mark.parametrize(("change", "test"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_layout_fails(change: Change, test: Callable[[LayoutSuite], None]) -> None:
    class Suite(LayoutSuite):
        def make(self) -> Layout:
            return Faulty(change)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(Suite())


def test_shapes_and_numbers_of_ranks_can_be_added() -> None:
    asked: list[tuple[int, int]] = []

    class Suite(LayoutSuite):
        shards = (17,)

        def make(self) -> Layout:
            return Faulty(lambda unit, right: asked.append((unit.shards, len(unit.parameters))) or right)

        def units(self) -> Iterator[UnitGeometry]:
            yield from super().units()
            yield dataclasses.replace(next(super().units()), shards=99)

    Suite().test_every_parameter_lies_in_one_buffer_once()
    assert {shards for shards, _ in asked} == {17, 99}
