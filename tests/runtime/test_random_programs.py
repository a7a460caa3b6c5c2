"""Training programs drawn at random: each step is that of unsharded copies, or all ranks are told why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_checks import QUIET, check_all, programs

pytestmark = [pytest.mark.slow, *QUIET]


@programs(usual=120, nightly=2000)
def test_training_is_right_or_every_rank_is_told(first: int, number: int, tmp_path: Path) -> None:
    check_all(range(first, first + number), tmp_path)
