"""The suite for layouts passes for those that come with polyshard, and can be asked for more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry
from polyshard_layouts.layouts import Blocks, Flat, Rows
from polyshard_testing import LayoutSuite
from reference_models import Halves

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


@pytest.mark.nightly
class TestSmallBlocks(LayoutSuite):
    def make(self) -> Layout:
        return Blocks(CONTEXT, size=48, smallest=0)


@pytest.mark.slow
class TestTiles(LayoutSuite):
    def make(self) -> Layout:
        return Blocks(CONTEXT, size=[32, 32])


@pytest.mark.slow
class TestSeveralBuffers(LayoutSuite):
    # It is given as an object.
    test_factory_takes_a_context_and_options_by_name = None

    def make(self) -> Layout:
        return Halves()


def test_shapes_and_numbers_of_ranks_can_be_added() -> None:
    asked: list[tuple[int, int]] = []

    class Noting(Flat):
        def __init__(self) -> None:
            super().__init__(CONTEXT)

        def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
            asked.append((unit.shards, len(unit.parameters)))
            return super().arrange(unit)

    class Suite(LayoutSuite):
        shards = (17,)

        def make(self) -> Layout:
            return Noting()

        def units(self) -> Iterator[UnitGeometry]:
            yield from super().units()
            yield dataclasses.replace(next(super().units()), shards=99)

    Suite().test_every_parameter_lies_in_one_buffer_once()
    assert {shards for shards, _ in asked} == {17, 99}
