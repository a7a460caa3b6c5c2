"""What is shown while a run goes on: a live line in a terminal, plain lines elsewhere, nothing on other ranks.

Also what memory a rank needs, as a table.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

import polyshard
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table


class Progress(Protocol):
    """Told how a run goes. A context: what is live ends when it is left."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def trained(self, step: int, loss: float, bytes_per_second: float) -> None:
        """``step`` steps are done; the last one's loss, and the training speed of all ranks together."""

    def held_out(self, step: int, loss: float) -> None:
        """The loss on held-out files after ``step`` steps."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""


class Silent:
    """On every rank but the first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def trained(self, step: int, loss: float, bytes_per_second: float) -> None:
        return None

    def held_out(self, step: int, loss: float) -> None:
        return None

    def note(self, text: str) -> None:
        return None


class Lines(Silent):
    """Where the output is a file or a pipe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def trained(self, step: int, loss: float, bytes_per_second: float) -> None:
        print(f"step {step:>5}/{self._steps}  loss {loss:.4f}  {bytes_per_second:,.0f} tokens/s", flush=True)

    def held_out(self, step: int, loss: float) -> None:
        print(f"step {step:>5}/{self._steps}  held-out loss {loss:.4f} nats/byte", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)


class Live:
    """In a terminal: one line that changes, and above it the held-out losses."""

    def __init__(self, steps: int, console: Console) -> None:
        self._bar = Bar(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss [bold]{task.fields[loss]}[/]"),
            TextColumn("held-out [bold]{task.fields[held_out]}[/]"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("", total=steps, loss="-", held_out="-", speed="-")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def trained(self, step: int, loss: float, bytes_per_second: float) -> None:
        self._bar.update(self._task, completed=step, loss=f"{loss:.3f}", speed=f"{bytes_per_second:,.0f}")

    def held_out(self, step: int, loss: float) -> None:
        self._bar.update(self._task, held_out=f"{loss:.3f}")
        self._bar.console.print(f"step {step:>5}  held-out loss {loss:.4f} nats/byte", highlight=False)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def make_progress(steps: int, *, shown: bool) -> Progress:
    """What fits this rank, ``shown`` on one alone, and its standard output."""
    if not shown:
        return Silent()
    console = Console()
    return Live(steps, console) if console.is_terminal else Lines(steps)


#: AdamW keeps two tensors of a parameter's size.
ADAMW_STATES = 2


def show_memory(report: polyshard.MemoryReport) -> None:
    """Print ``report``, for a model that AdamW trains."""
    table = Table(
        title=f"memory of rank {report.rank} of {report.world_size:,}, without activations", title_justify="left"
    )
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="right")
    rows = (
        ("parameters: this rank's shards", report.master_nbytes),
        ("gradients: this rank's shards", report.gradient_nbytes),
        ("optimizer state (AdamW)", report.optimizer_nbytes(ADAMW_STATES)),
        ("gather buffers: whole units, at most", report.gathered_nbytes),
        ("reduction buffers: whole units, at most", report.reduction_nbytes),
    )
    for what, nbytes in rows:
        table.add_row(what, f"{nbytes:,}", readable(nbytes))
    table.add_section()
    total = report.total_nbytes(ADAMW_STATES)
    table.add_row("total", f"{total:,}", readable(total), style="bold")
    Console().print(table)


def readable(nbytes: int) -> str:
    """``nbytes`` with three digits and a unit."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
