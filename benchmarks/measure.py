"""What measuring needs whatever is measured: quiet, spreads, and where it was done."""

from __future__ import annotations

import gc
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


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
