"""What finding plugins costs a process that starts: importing polyshard, and resolving names among many packages.

    python benchmarks/resolution.py --out benchmarks/results/resolution.json

Every figure is of a fresh process. Imports are timed in one process, one after another, torch first: the difference of
two processes would be lost in what torch's own import varies by. Names are resolved among ``--distributions`` packages
in a folder made for it, whose metadata is as long as that of published ones. Files have been read before, so the disk
is not in it; compiled bytecode is there, as after an installation.

Garbage is not collected meanwhile. Once torch is imported, the next full pass over its objects is due after some
thousands more of them, takes as long as all that is measured here, and falls into whatever comes next.

Milliseconds belong to the machine, those of the wall clock to what else it does, too. What is to be compared is the
ratio of CPU times to that of ``import torch``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import cpu_model, provenance, spread, write

#: Largest accepted median, in milliseconds.
TARGETS_MS = {"import polyshard": 40.0, "resolve": 50.0}

#: Bytes of a README in a package's metadata.
README_NBYTES = 20 * 1024
RECORD_LINES = 120
#: One package in so many has entry points; one in so many offers plugins.
WITH_ENTRY_POINTS, WITH_PLUGINS = 3, 30
#: Prefix of the modules of the packages that are made.
CROWD = "crowd_of_plugins"

_CLOCK = """
import gc, json, sys, time
def now():
    return time.perf_counter(), time.process_time()
def between(earlier, later):
    return [round((b - a) * 1e3, 4) for a, b in zip(earlier, later)]
"""

#: Runs in a process that has imported nothing. A figure is a pair: milliseconds of wall clock, and of CPU time.
IMPORTS = (
    _CLOCK
    + """
began = now()
import torch
had_torch = now()
gc.collect()
gc.disable()
before = now()
import polyshard
had_polyshard = now()
polyshard.shard
had_engine = now()
print(json.dumps({
    "import torch": between(began, had_torch),
    "import polyshard": between(before, had_polyshard),
    "engine": between(had_polyshard, had_engine),
}))
"""
)

#: The default configuration's names, as sharding resolves them: one scan for all.
RESOLUTION = (
    _CLOCK
    + """
import polyshard
polyshard.shard
from polyshard import registry
from polyshard.registry import find
from polyshard.interfaces import Group
config = polyshard.ShardConfig()
choices = {
    Group.COLLECTIVES: config.collectives, Group.PRECISION: config.precision, Group.OFFLOAD: config.offload,
    Group.POLICIES: config.policy,
}
gc.collect()
gc.disable()
began = now()
find.offers_of(Group.COLLECTIVES)
scanned = now()
resolved = [registry.resolve(group, choice) for group, choice in choices.items()]
ended = now()
for group, choice in choices.items():
    registry.resolve(group, choice)
found = now()
assert [each.distribution for each in resolved] == ["polyshard"] * 4, resolved
print(json.dumps({
    "resolve": between(began, ended),
    "scan, of that": between(began, scanned),
    "again, without scan or import": between(ended, found),
    "imported": [name for name in sys.modules if name.startswith(sys.argv[1])],
}))
"""
)


def fill(site: Path, count: int) -> None:
    """Write metadata of ``count`` packages into ``site``, and the modules of those that offer plugins."""
    line = "A line of a README, as long as such lines are in the middle of a page.\n"
    readme = line * (README_NBYTES // len(line))
    for number in range(count):
        name = f"crowd-package-{number}"
        info = site / f"{name.replace('-', '_')}-1.{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.{number}\n\n{readme}")
        record = (f"crowd_{number}/part_{part}.py,sha256=x,1\n" for part in range(RECORD_LINES))
        (info / "RECORD").write_text("".join(record))
        if number % WITH_ENTRY_POINTS:
            continue
        lines = ["[console_scripts]", f"crowd-{number} = crowd_{number}:main"]
        if not number % WITH_PLUGINS:
            # Names of their own, and names that the default configuration uses.
            for group in ("collectives", "precision", "offload", "policies", "plugins"):
                lines += [f"[polyshard.{group}]", f"crowd{number} = {CROWD}_{number}:Plugin"]
            lines += ["[polyshard.offload]", f"none = {CROWD}_{number}:Plugin"]
            (site / f"{CROWD}_{number}.py").write_text("raise RuntimeError('nobody named this plugin')\n")
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def measured(program: str, rounds: int, *arguments: str, site: Path | None = None) -> list[dict[str, Any]]:
    """What ``program`` prints in each of ``rounds`` fresh processes, with the packages in ``site``."""
    path = [*filter(None, [os.environ.get("PYTHONPATH")]), *([str(site)] if site is not None else [])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", program, *arguments]
    answers = []
    for _ in range(rounds):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"a process to be measured failed:\n{done.stderr}")
        answers.append(json.loads(done.stdout))
    return answers


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Spread over ``rows`` of each figure that is a pair, in milliseconds of either clock."""
    names = [name for name in rows[0] if name != "imported"]
    return {
        name: {clock: spread([row[name][place] for row in rows]) for place, clock in enumerate(("wall_ms", "cpu_ms"))}
        for name in names
    }


def run(rounds: int, distributions: int) -> dict[str, Any]:
    """All figures; raises ``RuntimeError`` where a plugin was imported that nobody named."""
    measured(IMPORTS, 1)  # Compiles what is not compiled yet.
    imports = measured(IMPORTS, rounds)
    few = measured(RESOLUTION, rounds, CROWD)
    with tempfile.TemporaryDirectory() as site:
        fill(Path(site), distributions)
        measured(RESOLUTION, 1, CROWD, site=Path(site))
        many = measured(RESOLUTION, rounds, CROWD, site=Path(site))
    stray = sorted({name for row in many for name in row["imported"]})
    if stray:
        raise RuntimeError(f"plugins were imported that nobody named: {', '.join(stray)}")
    figures = {"imports": summary(imports), "as installed": summary(few), "in the crowd": summary(many)}
    torch_ms = figures["imports"]["import torch"]["cpu_ms"]["median"]
    held = figures["imports"] | figures["in the crowd"]
    ratios = {
        name: round(held[name]["cpu_ms"]["median"] / torch_ms, 4) for name in ("import polyshard", "engine", "resolve")
    }
    return {"figures": figures, "of_import_torch": ratios}


def environment() -> dict[str, Any]:
    return {
        "command": " ".join(["python benchmarks/resolution.py", *sys.argv[1:]]),
        **provenance(),
        **{name: importlib.metadata.version(name) for name in ("torch", "polyshard", "stevedore", "pluggy")},
        "distributions": len(list(importlib.metadata.distributions())),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to import polyshard, and to resolve names.")
    parser.add_argument("--rounds", type=int, default=15, help="fresh processes for each figure (default: %(default)s)")
    parser.add_argument("--distributions", type=int, default=300, help="packages to be made (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    settings = {"rounds": arguments.rounds, "distributions": arguments.distributions}
    results = {"environment": environment(), "targets_ms": TARGETS_MS, "settings": settings}
    results |= run(arguments.rounds, arguments.distributions)
    print(f"{'milliseconds':48}{'wall':>8}{'CPU':>8}{'q1':>8}{'q3':>8}")
    for case, figures in results["figures"].items():
        for name, clocks in figures.items():
            cpu = clocks["cpu_ms"]
            numbers = (clocks["wall_ms"]["median"], cpu["median"], cpu["q1"], cpu["q3"])
            print(f"{case + ': ' + name:48}" + "".join(f"{number:8.1f}" for number in numbers))
    for name, ratio in results["of_import_torch"].items():
        print(f"{name}: {ratio:.4f} of import torch")
    write(results, arguments.out)


if __name__ == "__main__":
    main()
