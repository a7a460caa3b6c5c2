"""A pytest plugin that ends a process in which no Python code runs any more.

pytest-timeout ends a test from Python, by either of its methods. Where a thread waits inside C++ with the interpreter
lock held, neither gets to run. The watchdog is a thread of C, needs no lock, and prints the stacks of all threads.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "deadlock_timeout",
        "seconds for one test with its fixtures before the whole run ends; more than pytest-timeout's; 0 for none",
        default="0",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A copy, since pytest puts a file of its own in the place of the standard error while a test runs.
    config.stash[_STDERR] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit = float(item.config.getini("deadlock_timeout"))
    if limit <= 0:
        return (yield)
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args:
        # A test that says that it takes longer.
        limit = max(limit, float(marker.args[0]) + 60)
    faulthandler.dump_traceback_later(limit, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
