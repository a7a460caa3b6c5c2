"""differences.md names tests that are there, and says something of each of FSDP2's names."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import polyshard_fsdp2
import pytest
import torch.distributed.fsdp as theirs
from polyshard_fsdp2 import FSDPModule, fully_shard

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("differences.md").read_text(encoding="utf-8")
_TEST = re.compile(r"`(test_\w+\.py)::(?:test_(?:on_ranks|beside_torch)\[)?(\w+)\]?`")
_ROWS = re.findall(r"^\| (?!what |---)(.*) \|$", PAGE, re.MULTILINE)


@cache
def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / "fsdp2" / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[:40])
def test_rows_name_tests_that_are_there(row: str) -> None:
    named = _TEST.findall(row)
    assert named
    for file, test in named:
        assert test in _tests(file), f"{file}::{test}"


def test_every_name_of_fsdp2_is_served_and_spoken_of() -> None:
    of_fsdp2 = [name for name in theirs.__all__ if name in polyshard_fsdp2.__all__]
    assert {"fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "UnshardHandle"} <= set(of_fsdp2)
    newer = {"DataParallelMeshDims", "GradientReductionHandle", "share_comm_ctx"}
    assert set(polyshard_fsdp2.__all__) - {"install", *newer} <= set(theirs.__all__)
    methods = {name for name in vars(theirs.FSDPModule) if not name.startswith("_")}
    assert methods - set(vars(FSDPModule)) == set()
    for name in methods:
        ours, wanted = (inspect.signature(getattr(each, name)).parameters for each in (FSDPModule, theirs.FSDPModule))
        assert list(ours) == list(wanted), name
        assert [each.default for each in ours.values()] == [each.default for each in wanted.values()], name
        assert [each.kind for each in ours.values()] == [each.kind for each in wanted.values()], name
    assert set(inspect.signature(theirs.fully_shard).parameters) <= set(inspect.signature(fully_shard).parameters)
    words = set(re.findall(r"\w+", PAGE))
    assert methods - words == set()
