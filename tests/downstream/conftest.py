"""Tests of this folder train with trainers of others, whose warnings are theirs, and take longer than other tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No warning is an error here, and a run of each engine has its own limit."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="module", autouse=True)
def ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Behind the tests of a file its processes are gone."""
    yield
    request.module.RANKS.close()
