"""Draws the README's chart: a training step of FSDP2's over polyshard's, with its defaults, for models of four sizes.

python benchmarks/speedup.py

Reads two runs of ``peers.py`` in ``benchmarks/results/``; the second has the model that is too large for the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from picture import FSDP2_COLOUR, POLYSHARD_COLOUR, commit_of, pyplot, save

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_RUNS = ("peers.json", "peers4-8b.json")
_CHART = _ROOT / "docs" / "speedup.svg"
#: The workloads of ``peers.py``, smallest first, and how many parameters each has.
_SIZES = {"host": "43 million", "300m": "322 million", "1b": "1.3 billion", "8b": "7.2 billion"}


class UnfitRunsError(Exception):
    """The runs cannot be shown in one chart."""


@dataclass(frozen=True)
class Speedup:
    """FSDP2's time of a step over polyshard's, of one model."""

    parameters: str
    """How many the model has, in words."""
    median: float
    """Over the rounds of a run."""
    lowest: float
    highest: float


def speedups(runs: Sequence[Mapping[str, Any]]) -> list[Speedup]:
    """One for each workload, smallest model first. Raises ``UnfitRunsError`` where one was not measured."""
    found = {workload: peers for run in runs for workload, peers in run["summary"].items()}
    missing = [workload for workload in _SIZES if "speed_to_fsdp2" not in found.get(workload, {}).get("polyshard", {})]
    if missing:
        raise UnfitRunsError(f"{', '.join(missing)} of polyshard and fsdp2 is in none of {', '.join(_RUNS)}")
    ratios = {workload: found[workload]["polyshard"]["speed_to_fsdp2"] for workload in _SIZES}
    return [
        Speedup(size, ratios[workload]["median"], ratios[workload]["min"], ratios[workload]["max"])
        for workload, size in _SIZES.items()
    ]


def source(runs: Sequence[Mapping[str, Any]]) -> str:
    """Where and with what the runs were made. Raises ``UnfitRunsError`` where that differs between them."""
    told = {
        f"{found['world_size']} x {found['device']}, torch {found['torch']}, {commit_of(found)}"
        for found in (run["environment"] for run in runs)
    }
    if len(told) > 1:
        raise UnfitRunsError(f"runs of one chart are from one machine and commit, these are of {' and of '.join(told)}")
    return told.pop()


def draw(bars: Sequence[Speedup], told: str, chart: Path) -> None:
    """A bar for each model, FSDP2's speed as a line; thin lines span the rounds."""
    figure, axes = pyplot().subplots(figsize=(7.2, 2.7))
    places = range(len(bars))[::-1]
    medians = [bar.median for bar in bars]
    spans = [[bar.median - bar.lowest for bar in bars], [bar.highest - bar.median for bar in bars]]
    axes.barh(places, medians, 0.62, xerr=spans, color=POLYSHARD_COLOUR, error_kw={"lw": 1, "ecolor": "#1e293b"})
    axes.axvline(1.0, color=FSDP2_COLOUR, lw=1.5)
    axes.text(1.0, len(bars) - 0.45, "FSDP2", color=FSDP2_COLOUR, ha="center")
    for place, bar in zip(places, bars, strict=True):
        axes.text(bar.highest + 0.04, place, f"{bar.median:.2f} x", va="center", fontweight="bold", fontsize=11)
    axes.set_yticks(places, [f"{bar.parameters} parameters" for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(bar.highest for bar in bars) + 0.35)
    axes.set_xlabel("steps in the time of one step of FSDP2; longer is better")
    save(
        figure, "Training speed beside FSDP2's", f"polyshard's defaults, medians and range of 3 rounds.\n{told}", chart
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and say where; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of what peers.py wrote")
    parser.add_argument("--out", type=Path, default=_CHART, help="the picture (default: %(default)s)")
    given = parser.parse_args(arguments)
    files = [given.results / name for name in _RUNS]
    if absent := [str(file) for file in files if not file.exists()]:
        # Not an error: all benchmarks may be run before the GPUs' figures are there.
        print(f"nothing drawn: {', '.join(absent)}: not there; see benchmarks/peers.py --help", file=sys.stderr)
        return 0
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    try:
        draw(speedups(runs), source(runs), given.out)
    except UnfitRunsError as error:
        print(f"nothing drawn: {error}", file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
