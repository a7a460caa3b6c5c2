"""Puts what ``peers.py --pretend`` measured into the page: one table of workloads and peers, and one of kernels.

    python benchmarks/pretended.py --write

Reads ``pretended*.json`` in ``benchmarks/results/``, each a run of some workloads.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import commit_of, source
from pages import markers, tell

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_PAGE = _ROOT / "benchmarks" / "figures.md"
_HEADINGS = {
    "fsdp2": "FSDP2",
    "fsdp2+compile": "FSDP2, compiled",
    "polyshard": "polyshard",
    "polyshard+compile": "compiled",
    "polyshard-captured": "captured",
    "polyshard-captured+compile": "captured and compiled",
    "local": "bound",
    "local+compile": "compiled bound",
}
#: Whose kernels are shown of each workload.
_PROFILED = "8b-selective"


def read_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs in ``pretended*.json`` of ``folder``, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("pretended*.json"))}


def times(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each workload: milliseconds a step of each peer, and what that is of the bounds and of FSDP2."""
    lines = ["| |" + "".join(f" {heading} |" for heading in _HEADINGS.values()), "|---" * (len(_HEADINGS) + 1) + "|"]
    notes = []
    for report in runs.values():
        for workload, peers in report["summary"].items():
            lines.append(f"| {workload} |" + "".join(f" {_cell(peers.get(name), peers)} |" for name in _HEADINGS))
            notes += [
                f"{workload}, {_HEADINGS[name]}: {figures['error'][:200]}."
                for name, figures in peers.items()
                if "error" in figures and name in _HEADINGS
            ]
    return "\n".join(lines) + ("\n\n" + " ".join(notes) if notes else "")


def _cell(figures: Mapping[str, Any] | None, peers: Mapping[str, Mapping[str, Any]]) -> str:
    if not figures or "error" in figures:
        return "-"
    text = f"{figures['ms']['median']:.1f}"
    fsdp2 = peers.get("fsdp2")
    return f"{text} ({fsdp2['ms']['median'] / figures['ms']['median']:.2f})" if fsdp2 and "ms" in fsdp2 else text


def memory(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each workload: peak and reserved GiB of FSDP2 and polyshard, ratios, and MFU."""
    lines = [
        "| | peak GiB, FSDP2 | polyshard | ratio | reserved | polyshard | ratio | MFU, FSDP2 | polyshard | bound |"
    ]
    lines.append("|---" * 10 + "|")
    for report in runs.values():
        for workload, peers in report["summary"].items():
            if any("ms" not in peers.get(name, {}) for name in ("fsdp2", "polyshard")):
                continue
            theirs, ours = peers["fsdp2"], peers["polyshard"]
            texts = [workload]
            for key in ("peak_gib", "peak_reserved_gib"):
                known = theirs[key] is not None
                texts += (
                    [f"{theirs[key]:.2f}", f"{ours[key]:.2f}", f"{ours[key] / theirs[key]:.3f}"] if known else ["-"] * 3
                )
            texts += [_best_mfu(peers, each) for each in ("fsdp2", "polyshard", "local")]
            lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _best_mfu(peers: Mapping[str, Mapping[str, Any]], family: str) -> str:
    found = [each["mfu"] for name, each in peers.items() if name.startswith(family) and each.get("mfu")]
    return f"{max(found):.3f}" if found else "-"


def kernels(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """What kernels computed in one step of each peer, in milliseconds."""
    rows = [row for report in runs.values() for row in report["rows"] if row["workload"] == _PROFILED]
    found: dict[str, Mapping[str, float]] = {
        row["peer"]: row["kernels"]["ms"] for row in rows if row.get("kernels") and row["peer"] in _HEADINGS
    }
    if not found:
        return ""
    names = [name for name in _HEADINGS if name in found]
    lines = [f"| {_PROFILED}, ms |" + "".join(f" {_HEADINGS[name]} |" for name in names)]
    lines.append("|---" * (len(names) + 1) + "|")
    for kind in found[names[0]]:
        lines.append(f"| {kind} |" + "".join(f" {found[name][kind]:.1f} |" for name in names))
    lines.append("| whole |" + "".join(f" {sum(found[name].values()):.1f} |" for name in names))
    return "\n".join(lines)


def markdown(runs: Mapping[str, Mapping[str, Any]]) -> str:
    if not runs:
        return "Not measured yet."
    first = next(iter(runs.values()))
    files = ", ".join(f"[{name}](results/{name})" for name in runs)
    rounds = statistics.median(report["settings"]["rounds"] for report in runs.values())
    commits = " and ".join(dict.fromkeys(commit_of(report["environment"]) for report in runs.values()))
    made = source(first).replace(commit_of(first["environment"]), commits)
    head = f"Rank 0 of {made}; {rounds:g} rounds; {files}. Milliseconds a step, and FSDP2's time over it."
    return "\n\n".join(part for part in (head, times(runs), memory(runs), kernels(runs)) if part)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them where asked; returns the process's exit code."""
    return tell(__doc__, lambda: markdown(read_runs(_RESULTS)), _PAGE, markers("pretended"), arguments)


if __name__ == "__main__":
    sys.exit(main())
