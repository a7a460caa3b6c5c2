"""Ranks for the tests of ``fully_shard``: processes over gloo, kept for those of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import KeptRanks


# Models of ``fully_shard`` are not closed, and each thread of their gloo groups wakes a hundred times a second.
@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    """Runs a function on every rank of a group that is kept."""
    kept = KeptRanks()
    yield kept
    kept.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs processes is not among the quick tests."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
