"""What the tests of ``benchmarks/`` share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import importing_from

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks() -> Iterator[Path]:
    """Their folder, from which a test imports as a script does."""
    with importing_from(BENCHMARKS):
        yield BENCHMARKS
