"""Puts what ``peers.py`` and ``gathers.py`` measured into the page, and draws the page's and the README's chart.

    python benchmarks/figures.py

Reads ``peers*.json`` and ``gathers.json`` in ``benchmarks/results/``. A file is one run. The chart is of the first of
``peers*.json`` that has timed rows. The page has the runs of that run's day and later. The
README's chart is FSDP2's time of a step over that of polyshard with its defaults, and over that of the fastest other
peer that trains, for models of four sizes at the newest commit that has all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pages import UnusablePageError, markers, placed
from summary import COLUMNS, cells, train_table

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
_PAGE = _ROOT / "benchmarks" / "figures.md"
_CHART = _ROOT / "docs" / "peers.svg"
_README_CHART = _ROOT / "docs" / "speedup.svg"
#: The workloads of the README's chart, smallest model first, and how many parameters each has.
_SIZES = {"host": "43 million", "300m": "322 million", "1b": "1.3 billion", "8b": "7.2 billion"}
_PEER_NAMES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "megatron": "Megatron-FSDP",
    "megatron-double-buffers": "Megatron-FSDP, two buffers",
    "deepspeed": "DeepSpeed ZeRO-3",
}
_FSDP2_COLOUR, _POLYSHARD_COLOUR, _OTHER_COLOUR = "#b45309", "#1d4ed8", "#9ca3af"
BEGIN, END = markers("peers")
_SHOWN = ("ms a step", "host ms", "FSDP2 / it", "no comm / it", "peak GiB", "reserved GiB", "off FSDP2")


def read_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs in ``peers*.json`` of ``folder``, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("peers*.json"))}


def commit_of(environment: Mapping[str, Any]) -> str:
    """The commit in ``environment``, as a source names it."""
    commit = str(environment.get("commit", ""))[:10] or "unknown"
    return f"commit {commit}{' with uncommitted changes' if environment.get('uncommitted_changes') else ''}"


def source(report: Mapping[str, Any]) -> str:
    """Where, with what and when a run was made."""
    found = report["environment"]
    versions = [f"torch {found['torch']}", f"Python {found['python']}"]
    versions += [f"{label} {found[key]}" for key, label in (("nccl", "NCCL"), ("driver", "driver")) if found.get(key)]
    return f"{found['world_size']} x {found['device']}, {', '.join(versions)}, {commit_of(found)}, {found['date']}"


def newest(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the runs that are not older than that of the chart."""
    drawn = _first_timed(runs)
    day = "" if drawn is None else drawn["environment"]["date"]
    return [name for name, report in runs.items() if report["environment"]["date"] >= day]


def markdown(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """All tables of all runs."""
    parts = [_of_run(name, report) for name, report in runs.items()]
    return "\n\n".join(parts) if parts else "Not measured yet."


def _of_run(name: str, report: Mapping[str, Any]) -> str:
    command = f"\n\n```\n{report['environment']['command']}\n```"
    parts = [f"{source(report)}; [{name}](results/{name}).{command}"]
    described = report["settings"]["work"]
    parts += [
        f"{described[workload]}:\n\n{_of_workload(peers)}" for workload, peers in report.get("summary", {}).items()
    ]
    without: dict[tuple[str, str, str], list[str]] = {}
    for skipped in report["skipped"]:
        kind = skipped["workload"], ", ".join(skipped["peers"]), skipped["reason"]
        without.setdefault(kind, []).append(str(skipped["round"] + 1))
    for (workload, peers, reason), numbers in without.items():
        parts.append(f"Of {workload}, {peers} are not in round {', '.join(numbers)}: {reason}.")
    if "train" in report:
        parts.append(f"```text\n{train_table(report['train'])}\n```")
    return "\n\n".join(parts)


def _of_workload(peers: Mapping[str, Mapping[str, Any]]) -> str:
    places = [position for position, (heading, _) in enumerate(COLUMNS) if heading in _SHOWN]
    lines = ["| |" + "".join(f" {COLUMNS[place][0]} |" for place in places), "|---" * (len(places) + 1) + "|"]
    for peer, figures in peers.items():
        if "error" not in figures:
            texts = cells(figures)
            lines.append(f"| {peer} |" + "".join(f" {texts[place]} |" for place in places))
    unserved = [f"{peer}: {figures['error'][:300]}." for peer, figures in peers.items() if "error" in figures]
    return "\n".join(lines) + ("\n\n" + " ".join(unserved) if unserved else "")


def bandwidths(report: Mapping[str, Any]) -> str:
    """The table of a run of ``gathers.py``: a line for each operation and size, columns for each number of ranks."""
    found = report["environment"]
    worlds = sorted({row["world_size"] for row in report["rows"]})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in report["rows"]:
        cut = "aligned" if row["aligned"] else "not aligned"
        line = lines.setdefault((row["operation"], row["backend"], f"{row['nbytes'] / 2**20:.0f}", cut), {})
        line[row["world_size"]] = f"{row['gb_s']:.0f} | {row['gemm_cost']['median']:.2f}"
    heads = "".join(f" {world} ranks, GB/s | GEMM cost |" for world in worlds)
    table = [f"| | | MiB | shards |{heads}", "|---" * (4 + 2 * len(worlds)) + "|"]
    table += [
        f"| {' | '.join(what)} |" + "".join(f" {line.get(world, '- | -')} |" for world in worlds)
        for what, line in sorted(lines.items(), key=lambda item: (*item[0][:2], int(item[0][2]), item[0][3]))
    ]
    versions = f"torch {found['torch']}, NCCL {found['nccl']}"
    made = f"{found['world_size']} x {found['device']}, {versions}, commit {found['commit'][:7]}, {found['date']}"
    return f"{made}; [gathers.json](results/gathers.json).\n\n" + "\n".join(table)


def _pyplot() -> Any:
    """matplotlib's ``pyplot``, drawing SVG in the common style."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same results give the same file: without a salt, the ids in it are random.
    mpl.rcParams.update(
        {"svg.hashsalt": "polyshard", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot as plots

    return plots


def _save(figure: Any, title: str, source: str, chart: Path) -> None:
    """Put the title above and where the figures come from below, write the file, and let go of the figure."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.text(0.01, 0.005, source, fontsize=7, color="#555555", va="bottom")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    chart.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(chart, metadata={"Date": None})
    _pyplot().close(figure)


def draw(report: Mapping[str, Any], chart: Path) -> None:
    """A panel for each workload; a bar is a peer's time over FSDP2's, its line the range over rounds."""
    panels = {
        workload: {peer: figures for peer, figures in peers.items() if "speed_to_fsdp2" in figures}
        for workload, peers in report["summary"].items()
    }
    panels = {workload: peers for workload, peers in panels.items() if peers}
    heights = [len(peers) for peers in panels.values()]
    figure, grid = _pyplot().subplots(
        len(panels),
        1,
        figsize=(7.2, 0.2 * sum(heights) + 0.75 * len(panels) + 0.6),
        squeeze=False,
        gridspec_kw={"height_ratios": [height + 1.5 for height in heights]},
    )
    for axes, (workload, peers) in zip(grid[:, 0], panels.items(), strict=True):
        _draw_panel(axes, peers)
        axes.set_title(workload, loc="left", fontsize=9)
    grid[-1][0].set_xlabel("time of a step, FSDP2 = 1")
    rounds = sorted({figures["rounds"] for peers in panels.values() for figures in peers.values()})
    counted = " to ".join(str(number) for number in dict.fromkeys((rounds[0], rounds[-1])))
    told = f"Medians and range of {counted} interleaved rounds, ms a step beside the bars.\n{source(report)}"
    _save(figure, "A training step beside FSDP2's", told, chart)


def _draw_panel(axes: Any, peers: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(peers)[::-1]
    speeds = [peers[name]["speed_to_fsdp2"] for name in names]
    times = [1 / speed["median"] for speed in speeds]
    below = [max(0.0, time - 1 / speed["max"]) for time, speed in zip(times, speeds, strict=True)]
    above = [max(0.0, 1 / speed["min"] - time) for time, speed in zip(times, speeds, strict=True)]
    labels = [name.replace(":collectives=", " ").replace(":collectives__", " ") for name in names]
    axes.barh(labels, times, xerr=[below, above], color=[_colour(name) for name in names], error_kw={"lw": 1})
    axes.axvline(1.0, color="#555555", lw=0.8, ls=":")
    for position, (name, time, more) in enumerate(zip(names, times, above, strict=True)):
        axes.text(time + more + 0.01, position, f" {peers[name]['ms']['median']:.1f}", va="center", fontsize=7)
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.margins(x=0.08)


def draw_speedups(runs: Mapping[str, Mapping[str, Any]], chart: Path) -> None:
    """Two bars for each model of the README's chart, polyshard and the fastest other peer; thin lines span the rounds.

    Of the newest commit at which all of these were measured, on one machine; nothing is drawn where there is none.
    """
    made, measured = _all_sizes(runs)
    if not measured:
        return
    bars: list[tuple[float, str, Mapping[str, Any], str]] = []
    for row, workload in enumerate(_SIZES):
        speeds = {peer: each["speed_to_fsdp2"] for peer, each in measured[workload].items()}
        # What computes alone does not train.
        others = {
            peer: speed for peer, speed in speeds.items() if not peer.startswith(("polyshard", "drop-in", "local"))
        }
        fastest = max(others, key=lambda peer: others[peer]["median"])
        bars.append((-row + 0.17, "polyshard", speeds["polyshard"], _POLYSHARD_COLOUR))
        bars.append((-row - 0.17, _PEER_NAMES.get(fastest, fastest), others[fastest], _OTHER_COLOUR))
    rounds = sorted({measured[workload]["polyshard"]["rounds"] for workload in _SIZES})
    figure, axes = _pyplot().subplots(figsize=(7.2, 3.1))
    places, names, found, colours = zip(*bars, strict=True)
    medians = [speed["median"] for speed in found]
    spans = [[each["median"] - each["min"] for each in found], [each["max"] - each["median"] for each in found]]
    axes.barh(places, medians, 0.3, xerr=spans, color=colours, error_kw={"lw": 1, "ecolor": "#1e293b"})
    axes.axvline(1.0, color=_FSDP2_COLOUR, lw=1.5)
    axes.text(1.0, 0.45, "FSDP2", color=_FSDP2_COLOUR, ha="center")
    for place, name, speed in zip(places, names, found, strict=True):
        own = name == "polyshard"
        text, weight = f"{speed['median']:.2f} x" + ("" if own else f" {name}"), "bold" if own else "normal"
        axes.text(speed["max"] + 0.04, place, text, va="center", fontweight=weight, fontsize=10 if own else 8)
    axes.set_yticks([-row for row in range(len(_SIZES))], [f"{size} parameters" for size in _SIZES.values()])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(speed["max"] for speed in found) + 0.5)
    axes.set_xlabel("steps in the time of one step of FSDP2; longer is better")
    counted = " to ".join(str(number) for number in dict.fromkeys((rounds[0], rounds[-1])))
    told = f"{made['world_size']} x {made['device']}, torch {made['torch']}, {commit_of(made)}"
    defaults = f"polyshard's defaults and the fastest of its peers, medians and range of {counted} rounds."
    _save(figure, "Training speed beside FSDP2's", f"{defaults}\n{told}", chart)


def _all_sizes(
    runs: Mapping[str, Mapping[str, Any]],
) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    """The newest environment in which models of all sizes were timed, and figures by workload and peer."""
    found: dict[tuple[str, str], dict[str, dict[str, Mapping[str, Any]]]] = {}
    made: dict[tuple[str, str], Mapping[str, Any]] = {}
    for report in sorted(runs.values(), key=lambda report: str(report["environment"]["date"])):
        environment = report["environment"]
        key = str(environment.get("commit")), f"{environment['world_size']} x {environment['device']}"
        made[key] = environment
        for workload, peers in report["summary"].items():
            timed = {peer: each for peer, each in peers.items() if "speed_to_fsdp2" in each}
            found.setdefault(key, {}).setdefault(workload, {}).update(timed)
    for key in reversed(found):
        if all("polyshard" in found[key].get(workload, {}) for workload in _SIZES):
            return made[key], found[key]
    return {}, {}


def _colour(peer: str) -> str:
    if peer.startswith("polyshard"):
        return _POLYSHARD_COLOUR
    return _FSDP2_COLOUR if peer.startswith("fsdp2") else _OTHER_COLOUR


def _first_timed(runs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    compared = (
        report
        for report in runs.values()
        if any("speed_to_fsdp2" in figures for peers in report["summary"].values() for figures in peers.values())
    )
    return next(compared, None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write page and chart, and say where; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=_RESULTS, help="folder of what peers.py wrote")
    parser.add_argument("--page", type=Path, default=_PAGE)
    parser.add_argument("--chart", type=Path, default=_CHART)
    parser.add_argument("--readme-chart", type=Path, default=_README_CHART)
    given = parser.parse_args(arguments)
    runs = read_runs(given.results)
    if not runs:
        # Not an error: all benchmarks may be run in the order of their names, and this one comes before peers.py.
        print(f"nothing written: {given.results} has no peers*.json; see benchmarks/peers.py --help", file=sys.stderr)
        return 0
    now = {name: runs[name] for name in newest(runs)}
    try:
        page = placed(given.page.read_text(encoding="utf-8"), markdown(now), (BEGIN, END))
        gathers = given.results / "gathers.json"
        if gathers.is_file():
            page = placed(page, bandwidths(json.loads(gathers.read_text(encoding="utf-8"))), markers("gathers"))
    except UnusablePageError as error:
        print(f"nothing written: {given.page}: {error}", file=sys.stderr)
        return 2
    given.page.write_text(page, encoding="utf-8")
    print(given.page)
    timed = _first_timed(runs)
    if timed is not None:
        draw(timed, given.chart)
        draw_speedups(now, given.readme_chart)
        print(given.chart)
    return 0


if __name__ == "__main__":
    sys.exit(main())
