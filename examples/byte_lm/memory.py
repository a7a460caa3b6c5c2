"""What memory a rank needs, as a table."""

from __future__ import annotations

import polyshard
from rich.console import Console
from rich.table import Table

#: AdamW keeps two tensors of a parameter's size.
ADAMW_STATES = 2


def show_memory(report: polyshard.MemoryReport, console: Console | None = None) -> None:
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
    (console or Console()).print(table)


def readable(nbytes: int) -> str:
    """``nbytes`` with three digits and a unit."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
