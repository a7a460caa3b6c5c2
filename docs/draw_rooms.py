"""Draws docs/rooms.svg: the rooms of docs/architecture.md, and which imports which, as grimp reads it off the code.

    python docs/draw_rooms.py

A test compares the picture with the code.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import grimp
import matplotlib

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("rooms.svg")

#: From top to bottom, each room with its folders and files. A room imports only rooms below it.
ROOMS = {
    "tools": ("tools/polyshard_tools",),
    "drop_ins": ("drop_ins",),
    "integrations": ("integrations",),
    "testing": ("testing/polyshard_testing",),
    "plugins": ("backends", "policies", "plugins"),
    "polyshard": tuple(f"core/polyshard/{name}.py" for name in ("__init__", "monitor", "preemption")),
    "checkpoint": ("core/polyshard/checkpoint",),
    "optim": ("core/polyshard/optim",),
    "capture": ("core/polyshard/capture",),
    "pipelining": ("core/polyshard/pipelining.py",),
    "state": ("core/polyshard/state",),
    "api": ("core/polyshard/api.py", "core/polyshard/extension.py", "core/polyshard/inspect"),
    "setup": ("core/polyshard/setup",),
    "functions": ("core/polyshard/functions",),
    "runtime": ("core/polyshard/runtime",),
    "planning": ("core/polyshard/planning",),
    "registry": ("core/polyshard/registry",),
    "listeners": tuple(f"core/polyshard/{name}.py" for name in ("events", "hookspecs")),
    "config": ("core/polyshard/config",),
    "io": ("core/polyshard/io",),
    "interfaces": ("core/polyshard/interfaces",),
    "base": tuple(f"core/polyshard/{name}.py" for name in ("_torch_private", "_version", "errors", "nested")),
}


def files(room: str) -> list[Path]:
    """The Python files of ``room``, relative to the checkout."""
    found: list[Path] = []
    for folder in ROOMS[room]:
        inside = [ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py")
        found += [path.relative_to(ROOT) for path in inside]
    return sorted(found)


def imports() -> dict[str, int]:
    """How many imports lead from a room to another, by ``"from > to"``."""
    room_of = {_module(path): room for room in ROOMS for path in files(room)}
    graph = grimp.build_graph(*{module.partition(".")[0] for module in room_of})
    found: Counter[str] = Counter()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            ends = room_of.get(importer), room_of.get(imported)
            if None not in ends and ends[0] != ends[1]:
                found[f"{ends[0]} > {ends[1]}"] += 1
    return dict(sorted(found.items()))


def _module(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    start = next(index for index, part in enumerate(parts) if part.startswith("polyshard"))
    return ".".join(part for part in parts[start:] if part != "__init__")


def draw(counts: dict[str, int]) -> None:
    """Write the picture: rooms down the diagonal, and in the row of each its imports, in the others' columns."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "polyshard"
    from matplotlib import pyplot

    places = {room: index for index, room in enumerate(ROOMS)}
    figure, axes = pyplot.subplots(figsize=(11, 7.5))
    box = {"boxstyle": "round,pad=0.3", "fc": "#dfe8f0", "ec": "#40566b"}
    for room, place in places.items():
        axes.plot([place, len(places) - 1], [place, place], color="#d0d7de", linewidth=0.8, zorder=0)
        axes.plot([place, place], [0, place], color="#d0d7de", linewidth=0.8, zorder=0)
        axes.text(place, place, f"{room}\n{len(files(room))}", ha="center", va="center", fontsize=7, bbox=box)
    for pair, count in counts.items():
        above, _, below = pair.partition(" > ")
        back = places[below] < places[above]
        dot = {"boxstyle": "circle,pad=0.2", "fc": "#ffd6cc" if back else "#ffffff", "ec": "#40566b"}
        axes.text(places[below], places[above], str(count), ha="center", va="center", fontsize=7, bbox=dot)
    axes.set_xlim(-0.7, len(places) - 0.3)
    axes.set_ylim(len(places) - 0.5, -0.6)
    axes.axis("off")
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None, "Description": json.dumps(counts)})
    pyplot.close(figure)


if __name__ == "__main__":
    draw(imports())
