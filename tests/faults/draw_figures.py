"""Writes the table of ``figures.md`` from what ``make test-faults`` left in ``build/faults``.

    python tests/faults/draw_figures.py

What was not run stays as ``benchmarks/results/faults.json`` has it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = Path(__file__).with_name("figures.md")
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"

#: What each record is about, in the order of the table.
TITLES = {
    "kills": "SIGKILL of one of three ranks, in every phase",
    "stops": "SIGSTOP of one of three ranks",
    "mistakes": "One rank raises, runs out of memory, leaves a block out, makes a step more, or gets NaN",
    "torchrun": "Restarts by torchrun behind a SIGKILL",
    "sigterm": "SIGTERM to one rank or all, then `--resume`",
    "jobs": "A rank or a job of two over torchft is killed, or stopped for 5 s; BACK: while it takes over the state",
    "kills_in_saves": "SIGKILL inside of saves",
    "writes": "ENOSPC and EIO at each call of a save",
    "object_store_kills": "Two ranks killed before each request of a save to an object store, and to memory by fsspec",
    "object_store_failures": "Each request of a save to an object store fails, or its answer is lost",
    "flips": "Single flipped bits",
    "manifests": "Values of a manifest replaced, and signed anew",
    "pickles": "Planted pickles",
    "soak": "Steps with saves on two ranks",
}


def table(results: dict[str, Any]) -> str:
    """The Markdown table of ``results``."""
    lines = ["| what was done | figures |", "|---|---|"]
    for name, title in TITLES.items():
        told = results.get(name)
        figures = "not run yet" if told is None else "; ".join(_figure(*pair) for pair in told["figures"].items())
        lines.append(f"| {title} | {figures} |")
    return "\n".join(lines) + "\n"


def _figure(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if isinstance(value, dict):
        return f"{words}: " + ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return f"{words}: " + ", ".join(map(str, value))
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value}"


def drawn(page: str, results: dict[str, Any]) -> str:
    """``page`` with the table of ``results`` between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table(results)}{END}{after}"


def main() -> None:
    """Take up what was run, and draw the table."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for path in sorted((ROOT / "build" / "faults").glob("*.json")):
        results[path.stem] = json.loads(path.read_text())
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(drawn(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
