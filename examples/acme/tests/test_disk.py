"""Holds ``Disk`` to the contract of offload managers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard_testing import OffloadSuite, plugin_context

from acme.disk import Disk


class TestDisk(OffloadSuite):
    def make(self) -> Disk:
        return Disk(plugin_context())

    def test_no_file_is_left_behind(self, tmp_path: Path) -> None:
        manager = Disk(plugin_context(), folder=str(tmp_path))
        master = manager.place(self.unit(6), torch.arange(6.0))
        assert list(tmp_path.iterdir()) == []
        assert master.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make it first"):
        Disk(plugin_context(), folder=str(tmp_path / "missing"))
