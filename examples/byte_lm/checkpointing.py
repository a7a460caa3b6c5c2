"""Where a run keeps its files, and how it is taken up again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

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


def new_run_folder(output: Path) -> Path:
    """Make and return a folder ``output/run-NNN`` that did not exist."""
    number = max(_run_numbers(output), default=0) + 1
    folder = output / f"run-{number:03d}"
    folder.mkdir(parents=True)
    return folder


def last_run_folder(output: Path) -> Path:
    """The latest run in ``output`` that has a checkpoint. Raises ``ConfigError`` where there is none."""
    for number in sorted(_run_numbers(output), reverse=True):
        folder = output / f"run-{number:03d}"
        if polyshard.checkpoint.latest(checkpoint_root(folder)) is not None:
            return folder
    raise ConfigError(f"there is no checkpoint to resume in {output}. Run once without --resume, or set run.output.")


def checkpoint_root(folder: Path) -> Path:
    """Where the run in ``folder`` keeps its checkpoints."""
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
    extra = {"step": step, "run": dataclasses.asdict(run), "digest": digest, "history": history.as_table()}
    return polyshard.checkpoint.save(checkpoint_root(folder), step, model, optimizer, extra=extra, keep=_KEPT)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, run: RunSettings, digest: str
) -> tuple[int, History]:
    """Load the latest checkpoint in ``folder``; returns the steps done and what was recorded. Every rank calls it.

    Raises ``ConfigError`` where the run went with other settings or other text, so that its next step could not be the
    one that it would have made.
    """
    directory = polyshard.checkpoint.latest(checkpoint_root(folder))
    if directory is None:
        raise ConfigError(f"there is no checkpoint to resume in {folder}. Run once without --resume.")
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
    return int(extra["step"]), History.from_table(extra["history"])


def _run_numbers(output: Path) -> list[int]:
    names = (path.name.removeprefix("run-") for path in output.glob("run-*") if path.is_dir())
    return [int(name) for name in names if name.isdecimal()]
