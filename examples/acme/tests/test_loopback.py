"""Holds ``Loopback`` to the contract of collectives."""

from __future__ import annotations

import pytest
from polyshard.errors import WorldSizeError
from polyshard_testing import CollectivesSuite, Rank, plugin_context

from acme.loopback import Loopback


class TestLoopback(CollectivesSuite):
    def make(self, rank: Rank) -> Loopback:
        return Loopback(plugin_context(), world_size=rank.world_size, rank=rank.rank)


def test_a_rank_that_is_not_there_is_refused() -> None:
    with pytest.raises(WorldSizeError, match="no rank 2 of 2"):
        Loopback(plugin_context(), world_size=2, rank=2)
