"""Packages of plugins that happen to be installed where tests run: hidden from those that say what is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import Distribution, MetadataPathFinder
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def no_other_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees polyshard's own plugins, and those of packages below ``tmp_path``, alone."""
    finds = MetadataPathFinder.find_distributions

    def find(*args: Any, **kwargs: Any) -> Iterator[Distribution]:
        return (each for each in finds(*args, **kwargs) if not _is_other(each, tmp_path))

    monkeypatch.setattr(MetadataPathFinder, "find_distributions", staticmethod(find))


def _is_other(distribution: Distribution, here: Path) -> bool:
    offers = any(each.group.startswith("polyshard.") for each in distribution.entry_points)
    own = distribution.metadata["Name"] == "polyshard"
    return offers and not own and not Path(str(distribution.locate_file(""))).is_relative_to(here)
