"""tests/fsdp/parity.md has every one of PyTorch's FSDP tests, and names tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tests" / "fsdp" / "parity.md"
_NODE = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")

#: Files of PyTorch's tests, releases 2.3 and 2.4, and how many there are in each.
PYTORCH = {
    "test_wrap.py": 21,
    "test_fsdp_use_orig_params.py": 19,
    "test_fsdp_core.py": 14,
    "test_fsdp_mixed_precision.py": 25,
    "test_fsdp_flatten_params.py": 10,
    "test_fsdp_grad_acc.py": 2,
    "test_fsdp_memory.py": 1,
}


@cache
def sections() -> dict[str, list[list[str]]]:
    """The cells of each table row, its header's first, by the section's heading."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            tables.setdefault(heading, []).append(cells)
    return tables


@cache
def defined_in(file: str) -> set[str]:
    """What follows the file in the node ids of the tests that it defines, without their parameters; or none of it."""
    found = {""}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(f"::{node.name}")
        elif isinstance(node, ast.ClassDef):
            found.update(f"::{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
    return found


def test_there_are_as_many_rows_as_pytorch_has_tests() -> None:
    rows = {file: [row[0] for row in sections()[file][1:]] for file in PYTORCH}
    assert {file: len(set(names)) for file, names in rows.items()} == PYTORCH
    assert sum(PYTORCH.values()) == sum(map(len, rows.values())) == 92
    assert " 92 tests of seven files " in PAGE.read_text(encoding="utf-8").replace("\n", " ")


@pytest.mark.slow
def test_every_test_that_is_named_exists() -> None:
    named = _NODE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 92
    for file, test in named:
        assert test in defined_in(file), f"{file}{test}"


def test_every_file_of_the_drop_ins_tests_is_named() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "fsdp").glob("test_*.py")}
    assert {file for file, _ in _NODE.findall(PAGE.read_text(encoding="utf-8"))} == files
