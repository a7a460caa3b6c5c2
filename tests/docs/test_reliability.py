"""``docs/reliability.md`` and the list of integrations: figures are those that were taken, and tests exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGE = ROOT / "docs" / "reliability.md"


def test_the_table_of_figures_is_that_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("draw_figures", ROOT / "tests" / "faults" / "draw_figures.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    page = draw.PAGE.read_text()
    assert page == draw.drawn(page, json.loads(draw.RESULTS.read_text()))


def test_every_fault_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "tests/" in line]
    assert len(rows) >= 12
    for row in rows:
        for name in re.findall(r"`(tests/[\w/]+\.py)`", row):
            assert (ROOT / name).is_file(), name


INTEGRATIONS = ROOT / "tests" / "integrations" / "README.md"

_NAMED_TEST = re.compile(
    r"(transformers|accelerate|peft|safetensors|lightning|tensorboard|torch(?:data|ft)?) (\d[\w.]*)"
)

_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


#: The versions that tests run with, whatever else is installed.
_PINNED = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def rows() -> list[list[str]]:
    """The cells of each row of the table."""
    lines = [line for line in INTEGRATIONS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_is_what_is_tested(row: list[str]) -> None:
    package, _, _, _, tests = row
    named = dict(_NAMED_TEST.findall(package))
    assert named
    assert named.items() <= _PINNED.items()
    found = _TEST.findall(tests)
    assert found
    for file, function in found:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        assert function in names if function else any(name.startswith("test_") for name in names)
