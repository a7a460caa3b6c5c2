"""Ranks that come too late to ``shard()``, before it or inside of it: all are told alike, call again, and train."""

from __future__ import annotations

import random
import time

import polyshard
import pytest
import torch
from fault_figures import record
from parity import Net, seeded, square_step
from polyshard import ShardConfig
from polyshard.errors import RankMismatchError
from processes import RankPool
from torch import nn

TURNS = 20
RANKS = 4
TIMEOUT_S = 1.0


class Slow(nn.Linear):
    """Its initialisation takes as long as this says."""

    seconds = 0.0

    def reset_parameters(self) -> None:
        time.sleep(Slow.seconds)
        super().reset_parameters()


def come_late(rank: int, late: int, seconds: float, inside: bool, sync: bool) -> tuple[str, float, float]:
    """What this rank was told, after how many seconds, and the first loss once all have called again."""
    Slow.seconds = seconds if inside and rank == late else 0.0
    if rank == late and not inside:
        time.sleep(seconds)
    with torch.device("meta"):
        unmade = nn.Sequential(Slow(4, 4), Slow(4, 2))
    begun = time.monotonic()
    config = ShardConfig(timeout_s=TIMEOUT_S, sync_module_states=sync)
    with pytest.raises(RankMismatchError) as told:
        polyshard.shard(unmade, config)
    took = time.monotonic() - begun
    Slow.seconds = 0.0
    model = polyshard.shard(seeded(Net), ShardConfig(timeout_s=30.0, sync_module_states=sync))
    loss = square_step(model, 0, 0)[0].item()
    polyshard.close(model)
    return str(told.value), took, loss


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_ranks_that_come_too_late_call_again() -> None:
    expected = square_step(seeded(Net), 0, 0)[0].item()
    longest = 0.0
    with RankPool(RANKS) as pool:
        for turn in range(TURNS):
            chance = random.Random(turn)
            late, seconds = chance.randrange(RANKS), chance.uniform(1.5, 3.0) * TIMEOUT_S
            found = pool.run(come_late, late, seconds, turn % 2 == 1, turn % 4 >= 2, timeout=90)
            texts = {text for text, _, _ in found}
            assert len(texts) == 1, (turn, texts)
            assert f"Ranks [{late}] did not come to shard their model within 1 s" in texts.pop()
            assert all(loss == pytest.approx(expected, rel=1e-6) for _, _, loss in found)
            longest = max(longest, *(took for rank, (_, took, _) in enumerate(found) if rank != late))
    assert longest < TIMEOUT_S + 2
    record("late_ranks", turns=TURNS, ranks=RANKS, timeout_s=TIMEOUT_S, longest_s=round(longest, 2))
