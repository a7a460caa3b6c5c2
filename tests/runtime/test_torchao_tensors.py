"""torchao's float8 weights and ``NF4Tensor`` under ``polyshard.shard``, over gloo."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from processes import KeptRanks
from torchao_tensors import trains_and_is_saved

with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("torchao")

#: Importing torchao takes seconds a process.
pytestmark = pytest.mark.slow
RANKS = KeptRanks()


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("nf4", 2),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("nf4", 3), ("float8", 2), ("float8", 3))),
    ],
)
def test_trains_as_the_unsharded_model(kind: str, number: int, tmp_path: Path) -> None:
    host = torch.device("cpu")
    for found, wanted, names in RANKS.run(number, trains_and_is_saved, kind, number, host, str(tmp_path)):
        # Rounding of a mean over three moves values over the borders of float8.
        assert found == pytest.approx(wanted, rel=1e-2 if (kind, number) == ("float8", 3) else 1e-5)
        assert ("0.weight.quantized_data" in names) == (kind == "nf4")
        assert ("1.up.weight" in names) == (kind == "float8")
