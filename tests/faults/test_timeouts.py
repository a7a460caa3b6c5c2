"""Programs that catch a timeout and go on: each further step is refused by name on every rank, and nothing aborts."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import polyshard
import pytest
import torch
from fault_figures import record
from polyshard.errors import CollectiveError, StateError
from processes import RankPool
from program import At, build, config

RANKS = 3
TIMEOUTS = 10
STEPS_BEHIND = 3
TIMEOUT_S = 1.0
#: Seconds in which a step is refused: nobody is waited for.
LIMIT_S = 0.5
PLACES = (At.FORWARD, At.BACKWARD, At.OPTIMIZER)


def await_others(folder: Path, late: int) -> None:
    deadline = time.monotonic() + 60.0
    while any(not (folder / str(rank)).exists() for rank in range(RANKS) if rank != late):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def go_on(rank: int, late: int, place: At, check_ranks: bool, folder: str) -> tuple[str, list[str]]:
    """One rank comes to ``place`` of the second step when the others have given up, and have tried to go on."""
    here = Path(folder)
    model = polyshard.shard(build(), config(TIMEOUT_S, check_ranks))
    batch = torch.ones(4, 5)

    def step(waits: bool) -> None:
        if waits and place is At.FORWARD:
            await_others(here, late)
        loss = model(batch).square().mean()
        if waits and place is At.BACKWARD:
            await_others(here, late)
        loss.backward()
        if waits and place is At.OPTIMIZER:
            await_others(here, late)
        polyshard.clip_grad_norm_(model, 1.0)

    step(False)

    def fail() -> None:
        step(rank == late)
        # What the others had sent is there: a step of the late rank may end.
        assert rank == late
        step(False)

    with pytest.raises(CollectiveError) as caught:
        fail()
    found = []
    for _ in range(STEPS_BEHIND):
        begun = time.monotonic()
        with pytest.raises(StateError, match="an earlier communication of this model did not end") as refused:
            step(False)
        assert time.monotonic() - begun < LIMIT_S
        found.append(type(refused.value).__name__)
    (here / str(rank)).touch()
    # What the late rank sends arrives here.
    await_others(here, -1)
    return type(caught.value).__name__, found


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_steps_behind_a_caught_timeout_are_refused(tmp_path: Path) -> None:
    places: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    refused = 0
    for turn in range(TIMEOUTS):
        chance = random.Random(turn)
        late, place, check_ranks = chance.randrange(RANKS), PLACES[turn % len(PLACES)], bool(turn % 2)
        folder = tmp_path / str(turn)
        folder.mkdir()
        with RankPool(RANKS) as pool:
            # An abort of any process fails here.
            found = pool.run(go_on, late, place, check_ranks, str(folder))
        places[place.name] += 1
        errors.update(first for first, _ in found)
        refused += sum(len(behind) for _, behind in found)
    assert refused == TIMEOUTS * RANKS * STEPS_BEHIND
    record("timeouts", timeouts=TIMEOUTS, aborts=0, steps_refused=refused, places=places, errors=errors)
