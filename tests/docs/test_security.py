"""What ``SECURITY.md`` names exists."""

from __future__ import annotations

import re
from pathlib import Path

import polyshard.checkpoint
import polyshard.errors
from polyshard.config.sources import NO_SETTINGS

PAGE = Path(__file__).parents[2] / "SECURITY.md"


def test_names_and_variables_exist() -> None:
    text = PAGE.read_text()
    names = re.findall(r"`polyshard\.(checkpoint|errors)\.(\w+)", text)
    assert len(names) >= 3
    for module, name in names:
        assert hasattr(getattr(polyshard, module), name), name
    variables = set(re.findall(r"POLYSHARD_\w+", text))
    assert variables == set(NO_SETTINGS)
