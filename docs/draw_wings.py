"""Draws docs/wings.svg: which wing of the engine imports which, counted from the code.

    python docs/draw_wings.py

The counts also stand in the picture's description, where a test compares them with the code's.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import grimp
import matplotlib

ENGINE = "polyshard.engine"
#: From top to bottom, as import-linter holds them; those of one tuple do not know each other.
ROWS = (("surface", "capture"), ("cutting",), ("step",), ("gradients",), ("parameters",), ("transport",), ("planning",))
PICTURE = Path(__file__).with_name("wings.svg")


def imports() -> dict[str, int]:
    """How many imports lead from a wing to another, by ``"from > to"``."""
    graph = grimp.build_graph("polyshard")
    found: Counter[str] = Counter()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            ends = _wing(importer), _wing(imported)
            if None not in ends and ends[0] != ends[1]:
                found[f"{ends[0]} > {ends[1]}"] += 1
    return dict(sorted(found.items()))


def _wing(module: str) -> str | None:
    if not module.startswith(f"{ENGINE}."):
        return None
    wing = module.removeprefix(f"{ENGINE}.").partition(".")[0]
    return wing if any(wing in row for row in ROWS) else None


def _files(wing: str) -> int:
    folder = Path(__file__).parents[1] / "core" / "polyshard" / "engine" / wing
    return sum(path.name != "__init__.py" for path in folder.glob("*.py"))


def draw(counts: dict[str, int]) -> None:
    """Write the picture: wings down the diagonal, and in the row of each what it imports, in the others' columns."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "polyshard"
    from matplotlib import pyplot

    places = {wing: index for index, wing in enumerate(wing for row in ROWS for wing in row)}
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    box = {"boxstyle": "round,pad=0.4", "fc": "#dfe8f0", "ec": "#40566b"}
    for wing, place in places.items():
        axes.plot([place, len(places) - 1], [place, place], color="#d0d7de", linewidth=0.8, zorder=0)
        axes.plot([place, place], [0, place], color="#d0d7de", linewidth=0.8, zorder=0)
        axes.text(place, place, f"{wing}\n{_files(wing)} files", ha="center", va="center", fontsize=8, bbox=box)
    for pair, count in counts.items():
        above, _, below = pair.partition(" > ")
        dot = {"boxstyle": "circle,pad=0.25", "fc": "#ffffff", "ec": "#40566b"}
        axes.text(places[below], places[above], str(count), ha="center", va="center", fontsize=8, bbox=dot)
    axes.set_xlim(-0.7, len(places) - 0.3)
    axes.set_ylim(len(places) - 0.5, -0.6)
    axes.axis("off")
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None, "Description": json.dumps(counts)})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(imports())
