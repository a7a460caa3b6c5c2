"""``docs/reliability.md``: its figures are those that were taken, and its tests exist."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"


def test_the_table_of_figures_is_that_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("draw_reliability", ROOT / "docs" / "draw_reliability.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    page = PAGE.read_text()
    assert page == draw.drawn(page, json.loads(draw.RESULTS.read_text()))


def test_every_fault_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "tests/" in line]
    assert len(rows) >= 12
    for row in rows:
        for name in re.findall(r"`(tests/[\w/]+\.py)`", row):
            assert (ROOT / name).is_file(), name
