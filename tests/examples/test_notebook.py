"""The notebook: its form, and that it prints what its file shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from notebooks import code_cells, printed, run_cells

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.ipynb"))
_DECIMAL = re.compile(r"-?\d+\.\d+")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_prints_what_it_shows(path: Path) -> None:
    notebook = read(path)
    told = "run tests/support/notebooks.py"
    for cell, text in zip(code_cells(notebook), run_cells(notebook), strict=True):
        # Digits behind the point are the machine's.
        assert _DECIMAL.sub("#", text) == _DECIMAL.sub("#", printed(cell)), told
        found, shown = ([float(number) for number in _DECIMAL.findall(each)] for each in (text, printed(cell)))
        assert found == pytest.approx(shown, rel=0.02), told
