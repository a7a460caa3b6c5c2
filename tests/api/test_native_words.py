"""Errors of the engine speak of polyshard, not of the FSDP that its drop-in stands for."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polyshard
import pytest
from polyshard import ShardConfig, errors
from torch import nn


def sharded(**settings: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ShardConfig(collectives={"name": "fake", "world_size": 4}, policy="always", **settings)
    return polyshard.shard(model, config)


@pytest.mark.parametrize("call", [lambda m: polyshard.no_sync(m).__enter__(), polyshard.report, polyshard.close])
def test_calls_on_an_inner_module(call: Callable[[Any], Any]) -> None:
    model = sharded()
    with pytest.raises(
        errors.StateError, match=r"needs the outermost sharded module, but was given the inner one '1' .*rank 0"
    ) as caught:
        call(model[1])
    assert "FSDP" not in str(caught.value)


def _texts(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string in ``file`` that is no docstring."""
    tree = ast.parse(file.read_text())
    told = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.lineno, node.value


@pytest.mark.slow
def test_no_message_of_core_names_fsdp() -> None:
    core = Path(polyshard.__file__).parent
    # What joins trainers refuses theirs by name.
    joined = [core / name for name in ("accelerate", "lightning", "trainers", "transformers")]
    files = [file for file in core.rglob("*.py") if not any(file.is_relative_to(each) for each in joined)]
    found = [f"{file}:{line}: {text}" for file in files for line, text in _texts(file) if "FSDP" in text]
    assert not found
