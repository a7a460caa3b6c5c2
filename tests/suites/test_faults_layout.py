"""The suite of layouts: each of its tests is the one that fails over some layout."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry
from polyshard_layouts.layouts import Flat
from polyshard_testing import LayoutSuite, plugin_context
from suite_faults import WITH_OTHERS, Fault, failing, local_faults, names_of


class Sound(Layout):
    """``flat``, whose answer is changed below in one place each."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        self._flat = Flat(context)

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        return self._flat.arrange(unit)


Change = Callable[[UnitGeometry, Arrangement], Any]


class Faulty(Sound):
    """Sound but for one fault, made in units that it has no reason to."""

    api_version = 1
    change: Callable[[], Change]
    """Makes what is done to each answer."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self._change = self.change()

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        (right,) = super().arrange(unit)
        found: Any = self._change(unit, right)
        return found if isinstance(found, list) else [found]


def with_(**fields: Callable[[UnitGeometry, Arrangement], Any]) -> Change:
    return lambda unit, right: dataclasses.replace(right, **{k: v(unit, right) for k, v in fields.items()})


def padded(unit: UnitGeometry, right: Arrangement, by: int) -> Arrangement:
    return dataclasses.replace(right, shard_numel=unit.aligned_slice(right.shard_numel + by))


def last_overlaps(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    before = right.offsets[-1] - unit.alignment
    return dataclasses.replace(right, offsets=(*right.offsets[:-1], max(0, before)))


def cut_short(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    size = sum(each.numel for each in unit.parameters) // unit.shards
    return dataclasses.replace(right, shard_numel=size, exact=True)


def backwards(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return dataclasses.replace(right, order=right.order[::-1], offsets=right.offsets[::-1])


def dense(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    sizes = [each.numel for each in unit.parameters]
    return dataclasses.replace(right, offsets=tuple(itertools.accumulate(sizes, initial=0))[:-1])


def all_by_rows(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return dataclasses.replace(right, by_rows=frozenset(right.order))


def renaming(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    object.__setattr__(unit, "name", "mine")
    return right


def by_tensors(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    if unit.shards == 1:
        assert torch.tensor([each.numel for each in unit.parameters]).sum() >= 0
    return right


def of_its_rank(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return padded(unit, right, int(os.environ.get("RANK", "0")))


def at_random(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    return padded(unit, right, random.randrange(1000))


def element_by_element(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    # One unit of many: what takes seconds under a count takes some time without it, too.
    if unit.shards == 4096 and unit.itemsize == 2 and unit.parameters[0].shape == (50257, 64):
        for _ in range(unit.parameters[0].numel // 2):
            pass
    return right


def never(unit: UnitGeometry, right: Arrangement) -> Arrangement:
    while True:
        pass


class Remembering:
    """Answers more padding where it is asked again."""

    def __init__(self) -> None:
        self._seen: set[UnitGeometry] = set()

    def __call__(self, unit: UnitGeometry, right: Arrangement) -> Arrangement:
        again = unit in self._seen
        self._seen.add(unit)
        return padded(unit, right, 1) if again else right


def faulty(change: Callable[[], Change]) -> Layout:
    plugin = type("Planted", (Faulty,), {"api_version": 1, "change": staticmethod(change)})
    return plugin(plugin_context())


def fault(name: str, change: Callable[[], Change], *fails: str, why: str = "") -> Any:
    return pytest.param(Fault(lambda: faulty(change), fails, why), id=name)


TYPES = "answers_are_plain_numbers_in_the_types_of_the_contract"
ONCE = "every_parameter_lies_in_one_buffer_once"
OVERLAP = "parameters_do_not_overlap_and_lie_in_the_order_that_is_told"
ROWS = "what_is_cut_by_rows_has_whole_rows_in_every_slice"
AGAIN = "asking_again_gives_the_same_answer"
ALIKE = "every_rank_gets_the_same_answer"
ARITHMETIC = "it_is_arithmetic_alone"

FAULTS = [
    *local_faults(Sound, lambda plugin: plugin(plugin_context())),
    fault("offsets in a list", lambda: with_(offsets=lambda u, a: list(a.offsets)), TYPES),
    fault("a float", lambda: with_(shard_numel=lambda u, a: float(a.shard_numel)), TYPES),
    fault("rows in a set", lambda: with_(by_rows=lambda u, a: set()), TYPES),
    fault("one for true", lambda: with_(exact=lambda u, a: 1), TYPES),
    fault(
        "one missing",
        lambda: with_(order=lambda u, a: a.order[1:], offsets=lambda u, a: a.offsets[1:]),
        ONCE,
        TYPES,
        why="of one parameter, none is left",
    ),
    fault("one twice", lambda: lambda unit, right: [right, right], ONCE),
    fault("an overlap", lambda: last_overlaps, OVERLAP),
    fault("backwards", lambda: backwards, OVERLAP),
    fault("too short", lambda: cut_short, "slices_hold_every_parameter_to_its_end"),
    fault("misaligned", lambda: dense, "parameters_begin_at_multiples_of_the_alignment"),
    fault("misaligned slices", lambda: with_(shard_numel=lambda u, a: a.shard_numel + 1), "slices_are_aligned"),
    fault("rows that are cut", lambda: all_by_rows, ROWS),
    fault("rows of others", lambda: with_(by_rows=lambda u, a: frozenset({len(u.parameters)})), ROWS),
    fault("a memory", Remembering, AGAIN),
    fault("of its rank", lambda: of_its_rank, ALIKE),
    fault("random numbers", lambda: at_random, AGAIN, ALIKE, why="they differ each time"),
    fault("another name", lambda: renaming, "the_unit_is_left_as_it_was"),
    fault("tensors", lambda: by_tensors, ARITHMETIC),
    fault("elements one by one", lambda: element_by_element, "it_ends_soon"),
]


@WITH_OTHERS
@pytest.mark.parametrize("planted", FAULTS)
def test_only_these_fail(planted: Fault, others: bool) -> None:
    assert failing(LayoutSuite, planted, others) == set(planted.fails)


def test_every_test_is_the_one_that_catches_something() -> None:
    alone = {planted.values[0].fails[0] for planted in FAULTS if not planted.values[0].why_several}
    assert names_of(LayoutSuite) == alone


def test_a_layout_that_never_ends_is_ended() -> None:
    class Suite(LayoutSuite):
        def make(self) -> Layout:
            return faulty(lambda: never)

    with pytest.raises(pytest.fail.Exception, match="more than 1000000 lines of Python ran"):
        Suite().test_it_ends_soon()


def test_an_answer_that_is_no_arrangement_is_told() -> None:
    class Suite(LayoutSuite):
        def make(self) -> Layout:
            return faulty(lambda: lambda unit, right: [right, 0])

    with pytest.raises(AssertionError, match="in the unit 'a transformer block"):
        Suite().test_answers_are_plain_numbers_in_the_types_of_the_contract()
