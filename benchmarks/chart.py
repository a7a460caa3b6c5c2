"""Draws what ``host.py`` measured: host cost a unit, polyshard beside FSDP2.

python benchmarks/host.py --out benchmarks/results/host.json
python benchmarks/chart.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from picture import FSDP2_COLOUR, POLYSHARD_COLOUR, commit_of, pyplot, save

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results" / "host.json"
_CHART = _ROOT / "docs" / "host-cost.svg"
_REMEDY = "Measure first: python benchmarks/host.py --out {}"
#: The key of each peer in the results, its name in the chart, its colour and its marker.
_PEERS = (("fsdp2", "FSDP2", FSDP2_COLOUR, "s"), ("polyshard", "polyshard", POLYSHARD_COLOUR, "o"))


class UnusableResultsError(Exception):
    """The results are not those of ``host.py``."""


def read_results(path: Path) -> dict[str, Any]:
    """What ``host.py --out`` wrote. Raises ``UnusableResultsError``, saying what to run."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UnusableResultsError(f"{path} is no JSON: {error}. {_REMEDY.format(path)}") from error
    for table in ("environment", "settings", "step"):
        if not isinstance(report, dict) or not report.get(table):
            raise UnusableResultsError(f"{path} has no table '{table}'. {_REMEDY.format(path)}")
    return report


def draw(report: dict[str, Any], chart: Path) -> None:
    """One row for each precision, forward at the left, backward at the right; bars span the quartiles of the rounds."""
    steps = report["step"]
    figure, grid = pyplot().subplots(len(steps), 2, figsize=(7.2, 2.5 * len(steps) + 0.7), squeeze=False, sharey="row")
    for row, (precision, result) in zip(grid, steps.items(), strict=True):
        for axes, direction in zip(row, ("forward", "backward"), strict=True):
            _draw_panel(axes, result["own_us"][direction])
            axes.set_title(f"{direction}, {precision}", loc="left", fontsize=9)
        # Shared by both panels, so only once both are drawn.
        row[0].set_ylim(bottom=0)
        row[0].set_ylabel("own µs a unit")
    for axes in grid[-1]:
        axes.set_xlabel("parameters a unit")
    grid[0][0].legend(frameon=False)
    save(figure, "Host cost of a unit, less the plain module's own time", _source(report), chart)


def _draw_panel(axes: Any, own: dict[str, dict[str, dict[str, float]]]) -> None:
    for key, name, colour, marker in _PEERS:
        points = sorted((int(count), spread) for count, spread in own[key].items())
        counts = [count for count, _ in points]
        medians = [spread["median"] for _, spread in points]
        below = [spread["median"] - spread["q1"] for _, spread in points]
        above = [spread["q3"] - spread["median"] for _, spread in points]
        axes.errorbar(counts, medians, yerr=[below, above], label=name, color=colour, marker=marker, capsize=3)
        for count, median in zip(counts, medians, strict=True):
            axes.annotate(
                f"{median:.0f}", (count, median), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=7
            )
    axes.set_xticks(counts)
    axes.margins(y=0.15)


def _source(report: dict[str, Any]) -> str:
    environment, settings = report["environment"], report["settings"]
    return (
        f"Medians and quartiles of {settings['rounds']} rounds, {settings['units']} units, pretended collectives of "
        f"{settings['world_size']} ranks.\n{environment.get('cpu', 'unknown CPU')}, torch {environment.get('torch')}, "
        f"{commit_of(environment)}, {environment.get('date')}"
    )


def main() -> int:
    """Draw, and say where; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="what host.py wrote (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=_CHART, help="the picture (default: %(default)s)")
    given = parser.parse_args()
    if not given.results.exists():
        # Not an error: all benchmarks may be run in the order of their names, and this one comes before host.py.
        print(f"nothing drawn: {given.results} is not there. {_REMEDY.format(given.results)}", file=sys.stderr)
        return 0
    try:
        draw(read_results(given.results), given.out)
    except UnusableResultsError as error:
        print(f"nothing drawn: {error}", file=sys.stderr)
        return 2
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
