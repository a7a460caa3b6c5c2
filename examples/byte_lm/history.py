"""The losses of a run, as they are shown, drawn and saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclass
class History:
    """Losses in nats a byte, averaged over ranks."""

    train: list[float] = field(default_factory=list)
    """Of each step's batch, before that step's update; the first entry is step 1's."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """After so many steps, on the held-out files."""

    def as_table(self) -> dict[str, Any]:
        """Plain lists, for JSON and checkpoints."""
        return {"train": list(self.train), "held_out": [list(point) for point in self.held_out]}

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> History:
        return cls(list(table["train"]), [(int(step), float(loss)) for step, loss in table["held_out"]])


def draw_curve(history: History, path: Path, title: str) -> None:
    """Write the losses of ``history`` to the PNG file ``path``."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    # The canvas that is made here needs no display, and no setting of matplotlib's to be changed.
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(history.train) + 1), history.train, color="tab:blue", alpha=0.4, linewidth=0.8)
    axes.plot([], [], color="tab:blue", label="training batches")
    if history.held_out:
        steps, losses = zip(*history.held_out, strict=True)
        axes.plot(steps, losses, color="tab:red", marker="o", label="held-out files")
    axes.set_xlabel("step")
    axes.set_ylabel("loss in nats per byte")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
