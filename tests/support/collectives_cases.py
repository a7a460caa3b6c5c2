"""Runs single tests of a ``CollectivesSuite`` within a test, to say whether they fail."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def cases(test: Callable[..., None], world_size: int) -> Iterator[dict[str, Any]]:
    axes = [[{mark.args[0]: value} for value in mark.args[1]] for mark in getattr(test, "pytestmark", ())]
    if "world_size" in inspect.signature(test).parameters:
        axes.append([{"world_size": world_size}])
    for case in itertools.product(*axes):
        yield {name: value for part in case for name, value in part.items()}


def passes(suite: Any, name: str, world_size: int) -> bool:
    """Whether every case of the test ``name`` passes with so many ranks."""
    test = getattr(suite, name)
    try:
        for arguments in cases(test, world_size):
            test(**arguments)
    except pytest.skip.Exception:
        return True
    except (Exception, pytest.fail.Exception):
        return False
    return True
