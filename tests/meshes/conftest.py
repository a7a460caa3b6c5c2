"""The processes that tests of meshes share."""

from __future__ import annotations

import meshes
import pytest


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """They leave behind this folder: of what ``DTensor`` does, each process works out every operation once.

    The threads of gloo groups that nobody uses would keep waking.
    """
    if nextitem is None or nextitem.path.parent != item.path.parent:
        meshes.POOLS.close()
