"""The loss curve as a picture."""

from __future__ import annotations

from pathlib import Path

from history import History
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


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
