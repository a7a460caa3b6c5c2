"""Where scalars go beside what is shown: TensorBoard's files, and runs of Weights & Biases, offline at first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from polyshard.errors import ConfigError
from settings import Output


class Tracker(Protocol):
    """Keeps scalars. On one rank alone."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """What is known of ``step``, which is no earlier one than in the last call."""

    def close(self) -> None:
        """Nothing more comes."""


class TensorBoard:
    """Files for ``tensorboard --logdir``."""

    def __init__(self, folder: Path, done: int) -> None:
        """``done``: steps that an earlier start has done. What it wrote behind them is hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in ``folder/wandb``, one for each start, which ``wandb sync`` uploads.

    Without a network, unless the environment has another ``WANDB_MODE`` than ``offline``.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """``config``: what the run's page shows as its settings."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(silent=True)
        self._run = wandb.init(dir=folder, group=folder.name, config=dict(config), mode=mode, settings=quiet)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def require_trackers(output: Output) -> None:
    """Every rank calls it. Raises ``ConfigError`` where a package that ``output`` asks for is not installed."""
    for package, asked in (("tensorboard", output.tensorboard), ("wandb", output.wandb)):
        if asked and find_spec(package) is None:
            raise ConfigError(
                f"output.{package} is true, but the package {package!r} is not installed. Install it "
                f"(pip install {package}), or set output.{package} = false."
            )


def make_trackers(output: Output, config: Mapping[str, Any], done: int) -> list[Tracker]:
    """Those that ``output`` asks for. One rank calls it. ``done``: steps that an earlier start has done."""
    folder = Path(output.folder)
    made: list[Tracker] = []
    if output.tensorboard:
        made.append(TensorBoard(folder / "tensorboard", done))
    if output.wandb:
        made.append(WeightsAndBiases(folder, config))
    return made
