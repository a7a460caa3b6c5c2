"""The example under torchrun, whose ranks are killed: it ends where it would have ended."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from killed_runs import KILLS, LIMIT, STEPS, run, run_alone


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
