"""From the rounds of ``mechanisms.py`` to what each mechanism gains, and the short table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from measure import spread
from switches import WHOLE

Row = Mapping[str, Any]
_TIMES = ("device", "host", "processor")
_MEMORY = ("peak_gib", "reserved_gib", "kept_gib")


def summarise(report: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload -> mode -> mechanism -> figures; ``error`` alone where it has no finished round."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for model in report["models"]:
        modes = summary.setdefault(model["workload"], {}).setdefault(model["mode"], {})
        if model["mechanism"] != WHOLE:
            modes[model["mechanism"]] = _of_one(report, model)
    return summary


def _of_one(report: Mapping[str, Any], model: Row) -> dict[str, Any]:
    """Ratios are without the mechanism to with it, in the same round of the same heat."""
    name, heat = model["mechanism"], model["heat"]
    without, whole = _rounds_of(report["rows"], heat, name), _rounds_of(report["rows"], heat, WHOLE)
    common = sorted(without.keys() & whole.keys())
    # Later ones are of a model that failed behind some rounds.
    models = [each for each in report["models"] if each["heat"] == heat]
    mine = [each for each in models if each["mechanism"] == name]
    errors = [each["error"] for each in mine if "error" in each]
    if not common:
        return {"error": errors[-1] if errors else "no round was finished"}
    figures: dict[str, Any] = {"rounds": len(common), "steps": sum(len(without[r]["device_ms"]) for r in common)}
    for kind in _TIMES:
        key = f"{kind}_ms"
        pairs = [(statistics.median(without[r][key]), statistics.median(whole[r][key])) for r in common]
        figures[key] = {
            "without": round(statistics.median(off for off, _ in pairs), 4),
            "with": round(statistics.median(on for _, on in pairs), 4),
            "ratio": spread([off / on for off, on in pairs]),
        }
    base: Row = next((each for each in models if each["mechanism"] == WHOLE and "error" not in each), {})
    built: Row = next((each for each in mine if "error" not in each), {})
    for key in _MEMORY:
        figures[key] = {"without": built.get(key), "with": base.get(key)}
    # At steps of equal numbers both saw the same batches.
    both = zip(built.get("losses", []), base.get("losses", []), strict=False)
    figures["loss_difference"] = max((abs(off - on) / abs(on) for off, on in both), default=None)
    if errors:
        figures["errors"] = errors
    return figures


def _rounds_of(rows: Sequence[Row], heat: int, name: str) -> dict[int, Row]:
    return {row["round"]: row for row in rows if (row["heat"], row["mechanism"]) == (heat, name)}


def _change(figures: Mapping[str, Any], key: str) -> str:
    memory = figures[key]
    if memory["with"] is None or memory["without"] is None:
        return "-"
    return f"{memory['with']:.2f} -> {memory['without']:.2f}"


def _ratio(figures: Mapping[str, Any], key: str) -> str:
    ratio = figures[key]["ratio"]
    return f"{ratio['median']:.3f} ({ratio['min']:.3f}..{ratio['max']:.3f})"


#: Of a line behind the mechanism's name: times without it over times with it, and what is with it -> without it.
HEADINGS = ("rounds", "ms with", "time", "host's time", "processor's", "peak GiB", "reserved GiB", "loss off")


def cells(figures: Mapping[str, Any]) -> list[str]:
    """One text for each of ``HEADINGS``."""
    difference = figures["loss_difference"]
    return [
        str(figures["rounds"]),
        f"{figures['device_ms']['with']:.2f}",
        _ratio(figures, "device_ms"),
        _ratio(figures, "host_ms"),
        _ratio(figures, "processor_ms"),
        _change(figures, "peak_gib"),
        _change(figures, "reserved_gib"),
        "-" if difference is None else f"{difference:.1e}",
    ]


def table(summary: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> str:
    """The summary in aligned columns, a block for each workload and mode."""
    lines: list[str] = []
    for workload, modes in summary.items():
        for mode, mechanisms in modes.items():
            grid = [[f"{workload}, {mode}", *HEADINGS]]
            grid += [[name, *cells(found)] for name, found in mechanisms.items() if "error" not in found]
            widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
            lines.append("")
            for first, *others in grid:
                texts = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
                lines.append("  ".join([first.ljust(widths[0]), *texts]))
            lines += [f"{name}: {found['error'][:300]}" for name, found in mechanisms.items() if "error" in found]
    return "\n".join(lines[1:])
