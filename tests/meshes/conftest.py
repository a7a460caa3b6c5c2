"""The processes that tests of meshes share."""

from __future__ import annotations

from collections.abc import Iterator

import meshes
import pytest


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    """They leave behind each file: the threads of gloo groups that nobody uses keep waking."""
    yield
    meshes.POOLS.close()
