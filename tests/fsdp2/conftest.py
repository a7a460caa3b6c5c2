"""Ranks for the tests of ``fully_shard``: processes over gloo, kept for those of this folder."""

from __future__ import annotations

import pytest
from processes import KeptRanks

RANKS = KeptRanks()


@pytest.fixture(scope="session")
def ranks() -> KeptRanks:
    """Runs a function on every rank of a group that is kept."""
    return RANKS


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The processes leave behind this folder: of what ``DTensor`` does, each works out every operation once.

    Models of ``fully_shard`` are not closed, and each thread of their gloo groups wakes a hundred times a second.
    """
    if nextitem is None or nextitem.path.parent != item.path.parent:
        RANKS.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs processes is not among the quick tests."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
