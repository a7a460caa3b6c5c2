"""Training programs drawn at random for FSDP's wrapper: each step is that of unsharded copies."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_checks import QUIET, check_all, programs
from random_programs import draw_wrapped

pytestmark = [pytest.mark.slow, *QUIET]


@programs(usual=60, nightly=500)
def test_training_is_that_of_unsharded_copies(first: int, number: int, tmp_path: Path) -> None:
    """All strategies, and two in one model; parameter groups, orders of norms, looks at whole parameters."""
    check_all(range(first, first + number), tmp_path, draw_wrapped)
