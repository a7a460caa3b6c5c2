"""Holds ``WholeHeads`` to the contract of layouts."""

from __future__ import annotations

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import ParameterGeometry, UnitGeometry
from polyshard_testing import LayoutSuite, plugin_context

from acme.whole_heads import WholeHeads


class TestWholeHeads(LayoutSuite):
    def make(self) -> WholeHeads:
        return WholeHeads(plugin_context(), rows=4)


def test_heads_are_not_cut() -> None:
    # Six heads of 4 rows of 10 over 4 ranks: two for each of three, and nothing but padding for the last.
    weight = ParameterGeometry("weight", (24, 10), (10, 1), torch.float32, True)
    unit = UnitGeometry("", (weight,), shards=4, itemsize=4)
    (arrangement,) = WholeHeads(plugin_context(), rows=4).arrange(unit)
    assert arrangement.shard_numel == 2 * 4 * 10


def test_heads_without_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        WholeHeads(plugin_context(), rows=0)
