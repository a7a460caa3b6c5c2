"""Draws docs/rooms.svg, which room imports which, and writes the list of files into docs/architecture.md.

    python docs/draw_rooms.py

Both are read off the code: imports by grimp, and the first sentence of each file's docstring. A test compares them.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import grimp
import matplotlib

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).with_name("rooms.svg")
PAGE = Path(__file__).with_name("architecture.md")

#: From top to bottom, each room with its folder and what it is about. A room imports only rooms below it.
ROOMS = {
    "tools": ("tools/polyshard_tools", "the command line; plans and forecasts, the doctor, explanations, templates"),
    "faces": ("faces", "drop-ins for PyTorch's FSDP1 and FSDP2; both enter the engine by `extension.py`"),
    "integrations": ("integrations", "trainers, and weights in Hugging Face files"),
    "testing": ("testing/polyshard_testing", "the conformance suites that plugin authors run"),
    "plugins": (
        ("backends", "policies", "plugins"),
        "collectives; policies; precision, offload and listeners. Core knows them by name only",
    ),
    "polyshard": (
        tuple(f"core/polyshard/{name}.py" for name in ("__init__", "monitor", "preemption")),
        "public names; a whole job: replicas that differ, ranks that are slow, ends that a signal asks for",
    ),
    "checkpoint": ("core/polyshard/checkpoint", "checkpoints: saving, loading, folders"),
    "optim": ("core/polyshard/optim", "optimizers that need whole tensors; averages of weights"),
    "capture": ("core/polyshard/capture", "the whole step as one CUDA graph"),
    "pipelining": (("core/polyshard/pipelining.py",), "models that are stages of a pipeline"),
    "state": ("core/polyshard/state", "state of models and optimizers as objects"),
    "api": (
        ("core/polyshard/api.py", "core/polyshard/extension.py", "core/polyshard/inspect"),
        "the public functions, the one door, and the one way to extend",
    ),
    "setup": ("core/polyshard/setup", "one request: plugins, plan, agreement of ranks, build"),
    "functions": ("core/polyshard/functions", "a sharded model between steps, for our functions and torch's"),
    "runtime": ("core/polyshard/runtime", "forward and backward"),
    "planning": ("core/polyshard/planning", "which parameters form units, and where they lie; reads, changes nothing"),
    "registry": ("core/polyshard/registry", "from a name to a plugin"),
    "listeners": (
        tuple(f"core/polyshard/{name}.py" for name in ("events", "hookspecs")),
        "the hooks of listeners, and their calls",
    ),
    "config": ("core/polyshard/config", "settings, and where each came from"),
    "io": ("core/polyshard/io", "bytes of tensors in files, and ranges of their elements"),
    "interfaces": ("core/polyshard/interfaces", "the contracts that plugins implement"),
    "base": (
        tuple(f"core/polyshard/{name}.py" for name in ("_torch_private", "_version", "errors", "nested")),
        "errors, walks of nested values, private names of torch",
    ),
}


def files(room: str) -> list[Path]:
    """The Python files of ``room``, relative to the checkout."""
    folders = ROOMS[room][0]
    found: list[Path] = []
    for folder in (folders,) if isinstance(folders, str) else folders:
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


def listing() -> str:
    """One line a file, room by room, as Markdown."""
    lines: list[str] = []
    for room, (folders, about) in ROOMS.items():
        where = (folders,) if isinstance(folders, str) else folders
        shown = "" if where[0].endswith(".py") else f" (`{'`, `'.join(where)}`)"
        lines += [f"**{room}**{shown}: {about}.", ""]
        for path in files(room):
            said = _first_sentence(ROOT / path)
            if said:
                inside = path.as_posix() if not isinstance(folders, str) else path.relative_to(folders).as_posix()
                lines.append(f"- `{inside}`: {said}")
        lines.append("")
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` of the architecture page with today's list of files."""
    return re.sub(r"(<!-- files -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{listing()}\n{m[2]}", text, flags=re.S)


def _module(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    start = next(index for index, part in enumerate(parts) if part.startswith("polyshard"))
    return ".".join(part for part in parts[start:] if part != "__init__")


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.])\s", " ".join(text.partition("\n\n")[0].split()), maxsplit=1)[0].rstrip(".")


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
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
