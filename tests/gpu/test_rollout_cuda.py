"""The example that hands weights to a generator, by handles of device memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from processes import gpu_ranks, run_script, share_device

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout"


@pytest.mark.skipif(share_device(), reason="the example gives each trainer a GPU of its own")
def test_a_generator_copies_out_of_the_trainers_memory(tmp_path: Path) -> None:
    """The generator has a GPU of its own where one is left, and shares rank 0's where none is."""
    settings = ("steps=6", "every=2", "verify=true", f"output={tmp_path}")
    arguments = [word for each in settings for word in ("--set", each)]
    done = run_script(gpu_ranks() + 1, EXAMPLE / "train.py", arguments, {**os.environ, "OMP_NUM_THREADS": "1"})
    assert not any(done.codes), done.output + done.errors
    history: list[dict[str, Any]] = json.loads((tmp_path / "history.json").read_text())
    assert [entry["step"] for entry in history] == [2, 4, 6]
    assert [entry["arrived"] for entry in history] == [entry["sent"] for entry in history]
    assert len({entry["sent"] for entry in history}) == 3
