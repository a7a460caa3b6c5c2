"""The example under ``torchrun``, whose ranks are killed until it was started twenty times anew."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fault_figures import record
from killed_runs import KILLS, LIMIT, STEPS, run, run_alone

RUNS = 7


@pytest.mark.faults
@pytest.mark.timeout(2400)
def test_restarts_end_where_the_run_would_have_ended(tmp_path: Path) -> None:
    expected = run_alone(2, tmp_path / "whole")
    restarts = 0
    for turn in range(RUNS):
        found = run(2, tmp_path / str(turn), random.Random(turn))
        assert (found.history, found.written) == (expected.history, expected.written), found.kills
        restarts += len(found.kills)
    assert restarts == RUNS * KILLS
    record("torchrun", restarts=restarts, good=restarts)


@pytest.mark.nightly
# Longer than a run may take, which then says where it stands.
@pytest.mark.timeout(2 * LIMIT)
def test_a_run_whose_ranks_are_killed_three_times_ends_bit_equal(tmp_path: Path) -> None:
    expected = run_alone(2, tmp_path / "whole")
    found = run(2, tmp_path / "killed", random.Random(0))
    assert len(found.kills) == KILLS
    assert len(expected.history["train"]) == STEPS
    assert found.history == expected.history
    assert found.written == expected.written
