"""Holds ``Metered`` to the contract of collectives, around collectives of threads and of processes."""

from __future__ import annotations

import torch
from polyshard_testing import CollectivesSuite, Rank, plugin_context, run_ranks

from acme.metered import Metered


class TestMetered(CollectivesSuite):
    def make(self, rank: Rank) -> Metered:
        return Metered(plugin_context(), inner=rank.collectives)


class TestMeteredInProcesses(TestMetered):
    ranks = "processes"


def test_bytes_of_other_ranks_are_counted() -> None:
    def gather(rank: Rank) -> int:
        collectives = Metered(plugin_context(), inner=rank.collectives)
        collectives.all_gather(torch.empty(2 * 3), torch.ones(3)).wait()
        return collectives.received

    assert run_ranks(2, gather) == [12, 12]
