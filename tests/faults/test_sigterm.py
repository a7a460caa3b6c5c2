"""The example, told to end at a random moment: it saves, says so by its exit code, and goes on bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import polyshard
import pytest
from fault_figures import record
from killed_runs import EXAMPLE, SETTINGS, STEPS
from processes import Finished, run_script

RANKS, SIGNALS = 2, 20
#: Seconds until all have ended.
LIMIT_S = 15.0


def run(output: Path, *arguments: str, chance: random.Random | None = None) -> tuple[Finished, float]:
    """Train; with ``chance``, one rank or all of them are told to end. Returns how long that took, too."""
    told_at: list[float] = []

    def tell(processes: Sequence[BaseProcess], written: Path) -> None:
        assert chance is not None
        step = chance.randrange(1, STEPS - 12)
        deadline = time.monotonic() + 60.0
        while not re.search(rf"step +{step}/{STEPS}  loss", written.read_text()):
            assert time.monotonic() < deadline, written.read_text()
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.2))
        victims = processes if chance.random() < 0.5 else [chance.choice(processes)]
        told_at.append(time.monotonic())
        for process in victims:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)

    changed = [word for setting in SETTINGS for word in ("--set", setting)]
    words = ["--config", str(EXAMPLE / "run.toml"), "--output", str(output), *changed, *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("POLYSHARD_")}
    variables["CUDA_VISIBLE_DEVICES"] = ""
    found = run_script(RANKS, EXAMPLE / "train.py", words, variables, 120.0, tell if chance is not None else None)
    return found, time.monotonic() - told_at[0] if told_at else 0.0


def result(output: Path, text: str) -> tuple[Any, str]:
    (folder,) = output.iterdir()
    return json.loads((folder / "history.json").read_text()), text.rpartition("the model writes:")[2]


def end_and_go_on(folder: Path, turn: int, expected: tuple[Any, str]) -> tuple[float, int]:
    output = folder / str(turn)
    found, seconds = run(output, chance=random.Random(turn))
    assert found.codes == [polyshard.Preemption.exit_code] * RANKS, (found.output, found.errors)
    match = re.search(r"ended the run behind step (\d+), which is saved", found.output)
    assert match is not None, found.output
    (newest, *_) = sorted(output.glob("run-*/checkpoints/step-*"), reverse=True)
    assert newest.name == f"step-{int(match[1]):08d}"
    again, _ = run(output, "--resume")
    assert again.codes == [0] * RANKS, (again.output, again.errors)
    assert result(output, again.output) == expected
    return seconds, int(match[1])


@pytest.mark.nightly
def test_a_run_that_is_told_to_end_saves_and_goes_on(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole")
    end_and_go_on(tmp_path, 1, result(tmp_path / "whole", whole.output))


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_many_runs_that_are_told_to_end_save_and_go_on(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole")
    expected = result(tmp_path / "whole", whole.output)
    ends = [end_and_go_on(tmp_path, turn, expected) for turn in range(SIGNALS)]
    slowest = max(seconds for seconds, _ in ends)
    assert slowest < LIMIT_S
    record("sigterm", signals=SIGNALS, clean=len(ends), bit_equal=len(ends), slowest_s=round(slowest, 1))
