"""The version stands wherever a release looks for it."""

from __future__ import annotations

from pathlib import Path

import release


def test_this_version_stands_everywhere() -> None:
    assert release.misnamed(Path(__file__).parents[2]) == []
