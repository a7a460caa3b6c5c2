"""Where a run keeps its files, and how it is taken up again: by whom, and from which checkpoint."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import polyshard
import polyshard.checkpoint
import torch
from history import History
from polyshard.errors import ConfigError
from settings import RunSettings
from torch import nn

#: Settings that may differ when a run is taken up again: they change no number.
_FREE = frozenset(
    {"output", "report_every", "checkpoint_every", "prompt", "sample", "temperature", "pretend_world_size"}
)
#: How many checkpoints of a run stay: the last, and one before it should the last turn out bad.
_KEPT = 2
#: In a run's folder: the job that trained there last.
_JOB = "job"


@dataclass(frozen=True)
class Launch:
    """One start of a job's processes by torchrun."""

    job: str
    """The same for all restarts of a job, and for no other job."""
    restarts: int
    """0 at the first start."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """What torchrun says; without it, a job that was never restarted."""
        job = environ.get("TORCHELASTIC_RUN_ID", "none")
        if job == "none":
            # torchrun's answer without a rendezvous; the process that restarts the ranks is the same for all of them.
            job = f"{socket.gethostname()}-{os.getppid()}"
        return cls(job, int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


class Loaded(NamedTuple):
    """What a checkpoint says of its run."""

    step: int
    """Steps that were done."""
    history: History
    draws_on: bool
    """Whether every rank draws the random numbers that it would have drawn; not with another number of ranks."""


def run_folder(output: Path, launch: Launch, *, resume: bool) -> Path:
    """The folder ``output/run-NNN`` of this run; one rank asks, and tells the others.

    What torchrun has restarted stays in the folder of its first start. ``resume``: go on in the latest run that has a
    checkpoint. Otherwise, and where there is none, a new folder is made.
    """
    folders = [output / f"run-{number:03d}" for number in sorted(_run_numbers(output), reverse=True)]
    if launch.restarts:
        found = next((folder for folder in folders if _job_of(folder) == launch.job), None)
        if found is not None:
            return found
    if resume:
        found = next((each for each in folders if latest_checkpoint(each) is not None), None)
        if found is not None:
            _write_job(found, launch.job)
            return found
    number = max(_run_numbers(output), default=0) + 1
    folder = output / f"run-{number:03d}"
    folder.mkdir(parents=True)
    _write_job(folder, launch.job)
    return folder


def latest_checkpoint(folder: Path) -> Path | None:
    """The last good checkpoint of the run in ``folder``; None where there is none yet."""
    return polyshard.checkpoint.latest(checkpoint_root(folder))


def checkpoint_root(folder: Path) -> Path:
    return folder / "checkpoints"


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: RunSettings,
    digest: str,
    history: History,
) -> Path:
    """Save everything that the steps after ``step`` depend on. Every rank calls it."""
    extra = {
        "step": step,
        "run": dataclasses.asdict(run),
        "digest": digest,
        "history": history.as_table(),
        "random": polyshard.random_states(model),
    }
    return polyshard.checkpoint.save(checkpoint_root(folder), step, model, optimizer, extra=extra, keep=_KEPT)


def load_checkpoint(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run: RunSettings,
    digest: str,
) -> Loaded:
    """Load the checkpoint ``directory``. Every rank calls it.

    Raises ``ConfigError`` where the run went with other settings or other text, so that its next step could not be the
    one that it would have made.
    """
    extra = polyshard.checkpoint.load(directory, model, optimizer)
    changed = [
        f"run.{name} was {extra['run'].get(name)!r} and is {value!r}"
        for name, value in dataclasses.asdict(run).items()
        if name not in _FREE and extra["run"].get(name) != value
    ]
    if changed:
        raise ConfigError(f"{directory} was saved with other settings: {'; '.join(changed)}. Set them as they were.")
    if extra["digest"] != digest:
        raise ConfigError(
            f"{directory} was trained on other text: the standard library differs. Resume with the same Python."
        )
    # With another number of ranks the batches are the same ones, shared out otherwise.
    try:
        polyshard.restore_random_states(model, extra.get("random", []))
    except ConfigError:
        draws_on = False
    else:
        draws_on = True
    return Loaded(int(extra["step"]), History.from_table(extra["history"]), draws_on)


def _run_numbers(output: Path) -> list[int]:
    names = (path.name.removeprefix("run-") for path in output.glob("run-*") if path.is_dir())
    return [int(name) for name in names if name.isdecimal()]


def _job_of(folder: Path) -> str | None:
    path = folder / _JOB
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _write_job(folder: Path, job: str) -> None:
    # In one step: whatever kills this process, the file says one job or the other.
    temporary = folder / f"{_JOB}.tmp"
    temporary.write_text(job, encoding="utf-8")
    temporary.replace(folder / _JOB)
