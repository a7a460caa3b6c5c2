"""What measuring needs whatever is measured: quiet, spreads, turns, where it was done, and the file."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes of at least one value."""
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low = high = values[0]
    return {
        "median": round(statistics.median(values), 4),
        "q1": round(low, 4),
        "q3": round(high, 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def output_of(*command: str) -> str:
    """What a command prints, run beside this file; empty where it fails or is not installed."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def provenance(commit: str | None = None) -> dict[str, Any]:
    """The ``commit``, or git's with whether files differ from it; Python, and the day.

    Whoever names the commit answers for it: the machine may hold a copy without history.
    """
    return {
        "commit": commit or output_of("git", "rev-parse", "HEAD"),
        "uncommitted_changes": commit is None
        and bool(output_of("git", "status", "--porcelain", "--untracked-files=no")),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """As Linux names it; empty elsewhere."""
    names = output_of("sh", "-c", "sed -n 's/^model name.*: //p' /proc/cpuinfo").splitlines()
    return names[0] if names else ""


def turned(items: Sequence[T], number: int) -> list[T]:
    """``items`` in the order of round ``number``: another one begins each time, as it meets what others left behind."""
    turn = number % len(items)
    return [*items[turn:], *items[:turn]]


def write(report: Mapping[str, Any], out: Path | None, rank: int = 0) -> None:
    """Put ``report`` into the file ``out``, if any; of several ranks the first does."""
    if out is not None and rank == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".part")
        partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        partial.replace(out)
