"""The table of integrations names tests that are there, and the versions that they run with."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
_NAMED = re.compile(r"(transformers|accelerate|peft|safetensors|lightning|torchdata|tensorboard|torch) (\d[\w.]*)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[list[str]]:
    """The cells of each row of the table."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_is_what_is_tested(row: list[str]) -> None:
    package, _, _, _, tests = row
    named = dict(_NAMED.findall(package))
    assert named
    assert named == {name: version(name).partition("+")[0] for name in named}
    found = _TEST.findall(tests)
    assert found
    for file, function in found:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
        assert function in names if function else any(name.startswith("test_") for name in names)
