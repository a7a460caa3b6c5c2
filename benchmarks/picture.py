"""How the benchmarks' charts look, and how they are saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The colours of FSDP2 and polyshard in every chart.
FSDP2_COLOUR, POLYSHARD_COLOUR, OTHER_COLOUR = "#b45309", "#1d4ed8", "#9ca3af"


def pyplot() -> Any:
    """matplotlib's ``pyplot``, drawing SVG in the common style."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same results give the same file: without a salt, the ids in it are random.
    mpl.rcParams.update(
        {"svg.hashsalt": "polyshard", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot as plots

    return plots


def save(figure: Any, title: str, source: str, chart: Path) -> None:
    """Put the title above and where the figures come from below, write the file, and let go of the figure."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.text(0.01, 0.005, source, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    chart.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chart, metadata={"Date": None})
    pyplot().close(figure)


def commit_of(environment: Mapping[str, Any]) -> str:
    """The commit in ``environment``, as a source names it."""
    commit = str(environment.get("commit", ""))[:10] or "unknown"
    return f"commit {commit}{' with uncommitted changes' if environment.get('uncommitted_changes') else ''}"
