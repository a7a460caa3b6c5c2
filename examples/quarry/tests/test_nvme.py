"""Holds ``Nvme`` to the contract of offload managers."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard_testing import OffloadSuite, plugin_context

from quarry.nvme import Nvme


class TestNvme(OffloadSuite):
    def make(self) -> Nvme:
        return Nvme(plugin_context(), folder=tempfile.gettempdir(), min_nbytes=0)

    def test_masters_and_gradients_lie_in_files_that_have_no_name(self, tmp_path: Path) -> None:
        manager, unit = Nvme(plugin_context(), folder=str(tmp_path), min_nbytes=0), self.unit(6)
        master = manager.place(unit, torch.arange(6.0))
        gradient = manager.store_grad(unit, torch.ones(6, dtype=torch.bfloat16), None)
        manager.sync_for_step()
        assert master.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert gradient.tolist() == [1.0] * 6
        assert list(tmp_path.iterdir()) == []
        assert _mapped_from(tmp_path, master)
        assert _mapped_from(tmp_path, gradient)

    def test_small_units_stay_on_the_device(self, tmp_path: Path) -> None:
        units = [self.unit(6, name="blocks.0"), self.unit(5, name="blocks.1")]
        assert list(Nvme(plugin_context(), folder=str(tmp_path), min_nbytes=24).units_to_offload(units)) == units[:1]

    def test_a_disk_without_room_is_told_before_it_is_written_to(self, tmp_path: Path) -> None:
        manager = Nvme(plugin_context(), folder=str(tmp_path), min_nbytes=0)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(ConfigError, match=r"blocks\.0 needs 8,192 bytes of folder"):
                manager.place(self.unit(2048), torch.zeros(2048))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []


def _mapped_from(folder: Path, tensor: torch.Tensor) -> bool:
    """Whether ``tensor``'s memory maps a file below ``folder``, as the kernel tells."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(address, 16) for address in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return str(folder) in line
    return False


@pytest.mark.parametrize(
    ("options", "words"),
    [({"folder": "/missing/folder"}, "make it first"), ({"folder": ".", "min_nbytes": -1}, "0 or more, not -1")],
)
def test_options_that_do_not_do_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Nvme(plugin_context(), **options)  # type: ignore[arg-type]
