"""The processes that all tests of meshes share."""

from __future__ import annotations

from collections.abc import Iterator

import meshes
import pytest


@pytest.fixture(scope="session", autouse=True)
def close_pools() -> Iterator[None]:
    """They leave at the end of the run."""
    yield
    meshes.POOLS.close()
