"""A rank that does not come: the others say at which communication they waited."""

from __future__ import annotations

import time

import polyshard
import pytest
from parity import Block, Net, draw, seeded, units_of
from polyshard.errors import CollectiveError
from processes import RankPool


def wait_for_one(rank: int) -> tuple[float, str, str]:
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(timeout_s=3, policy=units_of(Block)))
    model(draw(4, 3, rank=rank)).sum().backward()
    if rank:
        time.sleep(8)
        return 0.0, "", ""
    begun = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        model(draw(4, 3, rank=rank))
    return time.monotonic() - begun, type(caught.value).__name__, str(caught.value)


def test_a_rank_that_sleeps_is_waited_for_no_longer_than_the_limit() -> None:
    with RankPool(2) as pool:
        (took, kind, text), _ = pool.run(wait_for_one)
    assert took < 10
    assert kind == "CollectiveTimeoutError"
    assert "Rank 0 waited for its communication number " in text
    assert "all_gather of '(root)', in forward." in text
