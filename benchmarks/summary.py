"""From the rows of ``peers.py`` to medians over rounds, ratios between peers of one round, and the short table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from measure import spread

Row = Mapping[str, Any]
#: What each ratio is taken to, within a round and with the blocks compiled alike.
BASELINES = ("fsdp2", "local", "polyshard")
_ONCE = ("wrap_s", "first_step_s")
_MEMORY = ("peak_gib", "peak_reserved_gib", "whole_peak_gib", "reserved_at_end_gib", "reserved_after_step_2_gib")


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload -> peer -> figures. A peer without a finished round has the ``error`` of its last one instead."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        summary.setdefault(row["workload"], {}).setdefault(row["peer"], {})
    for workload, peers in summary.items():
        for peer in peers:
            peers[peer] = _of_one(rows, workload, peer)
    return summary


def _of_one(rows: Sequence[Row], workload: str, peer: str) -> dict[str, Any]:
    mine = {row["round"]: row for row in rows if (row["workload"], row["peer"]) == (workload, peer)}
    done = {number: row for number, row in mine.items() if "error" not in row}
    errors = [row["error"] for row in mine.values() if "error" in row]
    if not done:
        return {"error": errors[-1]}
    figures: dict[str, Any] = {"rounds": len(done), "ms": spread([row["ms"]["median"] for row in done.values()])}
    figures["ms_steps"] = {
        "min": min(row["ms"]["min"] for row in done.values()),
        "max": max(row["ms"]["max"] for row in done.values()),
    }
    figures["host_ms"] = _median(row["host_ms"]["median"] for row in done.values())
    for key in ("tokens_per_s", "mfu", *_ONCE, *_MEMORY):
        values = [row[key] for row in done.values() if row.get(key) is not None]
        figures[key] = _median(values) if values else None
    figures["alloc_retries"] = max(row.get("alloc_retries") or 0 for row in done.values())
    if errors:
        figures["errors"] = errors
    suffix = "".join(peer.partition("+")[1:])
    for name in BASELINES:
        theirs = {
            row["round"]: row
            for row in rows
            if (row["workload"], row["peer"]) == (workload, name + suffix) and "error" not in row
        }
        _compare(figures, name, done, theirs)
    losses = next(iter(done.values()))["losses"]
    # Every round starts from the same weights, and sees the same batches.
    figures["losses_repeat"] = all(row["losses"] == losses for row in done.values()) if len(done) > 1 else None
    figures["loss"] = {"first": losses[0], "last": losses[-1]}
    return figures


def _compare(figures: dict[str, Any], name: str, mine: Mapping[int, Row], theirs: Mapping[int, Row]) -> None:
    """Add ratios to ``name``: of time above 1 where it took longer, of memory below 1 where it held more."""
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return
    figures[f"speed_to_{name}"] = spread([theirs[r]["ms"]["median"] / mine[r]["ms"]["median"] for r in common])
    if name != "fsdp2":
        return
    for key in _MEMORY:
        pairs = [(mine[r].get(key), theirs[r].get(key)) for r in common]
        ratios = [ours / other for ours, other in pairs if ours is not None and other]
        if ratios:
            figures[f"{key}_to_{name}"] = _median(ratios)
    figures["loss_difference"] = max(
        (
            abs(ours - other) / abs(other)
            for r in common
            for ours, other in zip(mine[r]["losses"], theirs[r]["losses"], strict=False)
        ),
        default=None,
    )


def _median(values: Iterable[float]) -> float:
    return round(float(statistics.median(values)), 4)


_Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda figures: "-" if figures.get(key) is None else format(figures[key], form)


def _ratio(key: str) -> Callable[[Mapping[str, Any]], str]:
    def text(figures: Mapping[str, Any]) -> str:
        ratio = figures.get(key)
        return f"{ratio['median']:.3f} ({ratio['min']:.3f}..{ratio['max']:.3f})" if ratio else "-"

    return text


#: Heading and text of every column behind the peer's name.
COLUMNS: tuple[_Column, ...] = (
    ("ms a step", lambda figures: f"{figures['ms']['median']:.1f}"),
    ("rounds' range", lambda figures: f"{figures['ms']['min']:.1f}..{figures['ms']['max']:.1f}"),
    ("host ms", _number("host_ms", ".1f")),
    ("FSDP2 / it", _ratio("speed_to_fsdp2")),
    ("no comm / it", _ratio("speed_to_local")),
    ("polyshard / it", _ratio("speed_to_polyshard")),
    ("peak GiB", _number("peak_gib", ".2f")),
    ("of FSDP2", _number("peak_gib_to_fsdp2", ".3f")),
    ("reserved GiB", _number("peak_reserved_gib", ".2f")),
    ("of FSDP2", _number("peak_reserved_gib_to_fsdp2", ".3f")),
    ("retries", _number("alloc_retries", "d")),
    ("wrap s", _number("wrap_s", ".2f")),
    ("first s", _number("first_step_s", ".2f")),
    ("tokens/s/GPU", _number("tokens_per_s", ",.0f")),
    ("MFU", _number("mfu", ".3f")),
    ("same bits", lambda figures: {True: "yes", False: "no", None: "-"}[figures.get("losses_repeat")]),
    ("loss", lambda figures: f"{figures['loss']['first']:.3f}→{figures['loss']['last']:.3f}"),
    ("off FSDP2", _number("loss_difference", ".1e")),
)


def cells(figures: Mapping[str, Any]) -> list[str]:
    """One text for each of ``COLUMNS``."""
    return [text(figures) for _, text in COLUMNS]


def table(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The summary in aligned columns, a block for each workload."""
    lines: list[str] = []
    for workload, peers in summary.items():
        grid = [[workload, *(heading for heading, _ in COLUMNS)]]
        grid += [[peer, *cells(figures)] for peer, figures in peers.items() if "error" not in figures]
        widths = [max(len(line[column]) for line in grid) for column in range(len(grid[0]))]
        lines.append("")
        for line in grid:
            first, *others = (text.rjust(width) for text, width in zip(line, widths, strict=True))
            lines.append("  ".join([first.strip().ljust(widths[0]), *others]))
        lines += [f"{peer}: {figures['error'][:300]}" for peer, figures in peers.items() if "error" in figures]
    return "\n".join(lines[1:])


def kernel_tables(rows: Sequence[Row]) -> str:
    """What the kernels of one step computed, a block for each workload and a column for each peer; milliseconds."""
    lines: list[str] = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        profiled = {row["peer"]: row["kernels"] for row in rows if row["workload"] == workload and row.get("kernels")}
        if not profiled:
            continue
        width = max(12, *map(len, profiled)) + 2
        lines += ["", f"{workload + ', kernels, ms':22}" + "".join(peer.rjust(width) for peer in profiled)]
        for kind in next(iter(profiled.values()))["ms"]:
            texts = (f"{each['ms'][kind]:.2f} ({each['launches'].get(kind, 0)})" for each in profiled.values())
            lines.append(f"{kind:22}" + "".join(text.rjust(width) for text in texts))
        wholes = (f"{sum(each['ms'].values()):.2f}" for each in profiled.values())
        lines.append(f"{'whole':22}" + "".join(text.rjust(width) for text in wholes))
    return "\n".join(["", *lines]) if lines else ""


def train_table(train: Mapping[str, Any]) -> str:
    """Losses of two peers side by side, their relative difference, and memory reserved meanwhile."""
    curves: Mapping[str, Any] = train["peers"]
    names = list(curves)
    base = curves[names[0]]
    lines = [f"{train['workload']}, {train['steps']} steps; difference to {names[0]}; GiB reserved after the step"]
    lines.append("step".rjust(6) + "".join(f"{name:>22}{'difference':>12}{'reserved':>10}" for name in names))
    for position, number in enumerate(base.get("at", [])):
        line = f"{number:6}"
        for name in names:
            curve = curves[name]
            if "error" in curve:
                line += f"{'-':>22}{'-':>12}{'-':>10}"
                continue
            loss, other = curve["losses"][position], base["losses"][position]
            reserved = curve["reserved_gib"][position]
            line += f"{loss:22.5f}{abs(loss - other) / other:12.2e}" + (
                f"{'-':>10}" if reserved is None else f"{reserved:10.3f}"
            )
        lines.append(line)
    lines += [f"{name}: {curve['error'][:300]}" for name, curve in curves.items() if "error" in curve]
    return "\n".join(lines)
