"""The files of ``benchmarks/`` import each other by plain names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Their folder, on the path. What was imported from it is not left to tests of others that use such names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield BENCHMARKS
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
