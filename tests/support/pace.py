"""A pytest plugin that keeps a run of all tests short."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker begins a long one when the others are done.

    A file stays whole: its tests share what its fixtures start.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave what stands at the start of a file out of the collections of garbage while its tests run.

    Torch's modules alone are a million objects, over which a full collection takes longer than most tests; and a
    ``ThreadedWorld`` collects wherever it is due.
    """
    if item.session.stash.get(_FILE, None) != item.path:
        item.session.stash[_FILE] = item.path
        gc.collect()
        gc.freeze()
    return (yield)


_FILE = pytest.StashKey[object]()
