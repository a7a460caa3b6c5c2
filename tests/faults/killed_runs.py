"""Runs the example under ``torchrun --max-restarts 3``, kills a rank three times, and compares it with one left be."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from processes import kill_tree, run_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "byte_lm"
KILLS = 3
STEPS = 40
#: Saves often, so that kills hit saves, too. A step takes some hundredths of a second.
SETTINGS = (
    f"run.steps={STEPS}",
    "run.width=32",
    "run.heads=2",
    "run.context=32",
    "run.batch=12",
    "run.warmup=2",
    "run.report_every=1",
    "run.eval_every=10",
    "run.eval_batches=1",
    "run.checkpoint_every=2",
    "run.sample=8",
)
#: Seconds for a whole run with its restarts.
LIMIT = 300.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    history: dict[str, Any]
    """Every loss, and the held-out ones."""
    written: str
    """What the model wrote, which depends on every parameter."""
    kills: tuple[str, ...]
    """Which rank was killed, and when."""


class Run:
    """``make demo`` on its way, whose output is read as it comes."""

    def __init__(self, ranks: int, output: Path) -> None:
        settings = " ".join(f"--set {setting}" for setting in SETTINGS)
        self._ranks = ranks
        self.text = ""
        self._process = subprocess.Popen(
            [
                "make",
                "demo",
                f"PY={sys.executable}",
                f"RANKS={ranks}",
                "LAUNCH=--max-restarts 3",
                f"ARGS=--output {output} {settings}",
            ],
            cwd=ROOT,
            # Restarted ranks otherwise find the addresses of those that were killed.
            env={**_variables(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._seen: set[int] = set()
        self._deadline = time.monotonic() + LIMIT

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.text += line

    def new_ranks(self) -> list[psutil.Process]:
        """The processes of the next start, once all of them are there."""
        while True:
            self.require_running()
            found = [process for process in self._workers() if process.pid not in self._seen]
            if len(found) == self._ranks:
                self._seen |= {process.pid for process in found}
                return found
            time.sleep(0.1)

    def _workers(self) -> list[psutil.Process]:
        workers = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if any(word.endswith("train.py") for word in command) and "torch.distributed.run" not in command:
                workers.append(process)
        return workers

    def require_running(self) -> None:
        if self._process.poll() is not None or time.monotonic() > self._deadline:
            self.end()
            raise AssertionError(f"the run ended, or went on for {LIMIT:g} s:\n{self.text}")

    def wait(self) -> int:
        """The exit code."""
        while self._process.poll() is None:
            self.require_running()
            time.sleep(0.05)
        self._reader.join()
        return self._process.returncode

    def end(self) -> None:
        """Leave no process behind."""
        if self._process.poll() is None:
            kill_tree(self._process)
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()


def run(ranks: int, output: Path, chance: random.Random) -> Outcome:
    """Train to the end under torchrun; one rank is killed three times, when ``chance`` says.

    Raises:
        AssertionError: the run failed, or began a second folder.
    """
    started = Run(ranks, output)
    kills: list[str] = []
    try:
        # Each start goes on from at most two steps before the last kill.
        for step in sorted(chance.randrange(1, STEPS - 6) for _ in range(KILLS)):
            kills.append(_kill(started, chance, step))
        code = started.wait()
    finally:
        started.end()
    assert code == 0, started.text
    return _outcome(output, started.text, kills)


def run_alone(ranks: int, output: Path) -> Outcome:
    """Train to the end, without torchrun and in forked ranks.

    Raises:
        AssertionError: the run failed.
    """
    changed = [word for setting in SETTINGS for word in ("--set", setting)]
    arguments = ["--config", str(EXAMPLE / "run.toml"), "--output", str(output), *changed]
    done = run_script(ranks, EXAMPLE / "train.py", arguments, _variables(), LIMIT)
    assert done.codes == [0] * ranks, done.errors
    return _outcome(output, done.output, [])


def _variables() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLYSHARD_", "MAKE", "MFLAGS"))}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def _outcome(output: Path, text: str, kills: list[str]) -> Outcome:
    (folder,) = output.iterdir()
    history: dict[str, Any] = json.loads((folder / "history.json").read_text())
    return Outcome(history, text.rpartition("the model writes:")[2], tuple(kills))


def _kill(started: Run, chance: random.Random, step: int) -> str:
    before = len(started.text)
    workers = started.new_ranks()
    if chance.random() < 0.25:
        # Anywhere between the first import and the first steps.
        delay, when = chance.uniform(0.0, 3.0), "of its start"
    else:
        while not any(f"step {shown:>5}/{STEPS}  loss" in started.text[before:] for shown in range(step, STEPS + 1)):
            started.require_running()
            time.sleep(0.005)
        delay, when = chance.uniform(0.0, 0.15), f"after step {step}"
    time.sleep(delay)
    victim = chance.choice(workers)
    rank = victim.environ().get("RANK", "?") if victim.is_running() else "?"
    assert victim.is_running(), f"the run was over before it could be killed {when}:\n{started.text}"
    victim.kill()
    return f"rank {rank} {when} + {delay:.2f} s"
