"""What each mechanism of the engine's fast path gains: the engine as it is beside the engine without that one.

    torchrun --standalone --nproc-per-node 2 benchmarks/mechanisms.py --seconds 215 --out mechanisms.json
    torchrun --standalone --nproc-per-node 2 benchmarks/mechanisms.py --device cpu --work tiny --rounds 2

``switches.py`` has the mechanisms and how each is switched off. The engine as it is and several that lack one mechanism
are built, warmed up, and take turns step by step, so that a busy host hits all alike; then they are dropped, and the
next ones come, with the engine as it is among them again. A round is a fixed number of turns, and its ratio that of the
two medians: time without the mechanism over time with it, above 1 where it pays. The table has the median over rounds
and the range. "nothing, again" lacks nothing: its ratio is noise. Steps are those of ``peers.py``. Peak memory is what
the third and fourth step of a model take, and what it keeps between steps.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
from contenders import Site, Step, contender
from measure import undisturbed
from memory import Memory, larger
from payoff import summarise, table
from ranks import Ranks
from runs import FailedError, Taken, environment, timed, together
from switches import AGAIN, MECHANISMS, WHOLE, Mechanism
from workloads import WORKLOADS, Batches, Workload

#: Batches that everyone goes round.
_POOL = 8
#: Steps before any round. What a model takes is read from those behind the first two: a captured one is recorded then.
_WARMUP, _SETTLED = 4, 2
#: Rounds that are made even where the time is up.
_FEWEST_ROUNDS = 3
#: Seconds to build and warm up a model, steps aside, for dividing the time alone.
_BUILD_S = 0.8
_WITH_ALL = Mechanism(WHOLE, "")


@dataclass(frozen=True, slots=True)
class Pace:
    """How one workload is run in one way."""

    turns: int
    """Steps of each model in a round."""
    beside: int
    """Models that two H200s have memory for at once."""
    step_s: float
    """Seconds of a step on them, for dividing the time alone."""


_PACES = {
    ("host", False): Pace(6, 12, 0.13),
    ("host", True): Pace(16, 12, 0.014),
    ("300m", False): Pace(4, 20, 0.06),
    ("300m", True): Pace(5, 7, 0.048),
    ("1b", False): Pace(3, 12, 0.145),
    ("1b", True): Pace(2, 4, 0.135),
}
_SLOW = Pace(2, 2, 1.0)
#: Rounds of each by which the time is divided.
_NOMINAL_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for."""

    workloads: tuple[Workload, ...]
    mechanisms: tuple[Mechanism, ...]
    captured: tuple[bool, ...]
    rounds: int
    turns: int | None
    seconds: float | None
    hang_timeout_s: float
    out: Path | None


@dataclass(frozen=True, slots=True)
class Heat:
    """Models that are there at once: the engine as it is, and without each of some mechanisms."""

    workload: Workload
    captured: bool
    mechanisms: tuple[Mechanism, ...]
    turns: int
    expected_s: float

    @property
    def mode(self) -> str:
        """How its steps run."""
        return "captured" if self.captured else "eager"


@dataclass
class _Run:
    """A model while it is there."""

    mechanism: Mechanism
    step: Step | None = None
    taken: list[Taken] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    needs_gib: float = 0.0
    """What the device must have free before one like it is built."""


def heats_of(settings: Settings, device_type: str) -> list[Heat]:
    """All heats of a run, in their order."""
    heats = []
    for workload in settings.workloads:
        for captured in settings.captured:
            pace = _PACES.get((workload.name, captured), _SLOW)
            acting = [m for m in settings.mechanisms if m.acts_in(workload.name, captured, device_type)]
            most = pace.beside - 1 if device_type == "cuda" else max(1, len(acting))
            turns = settings.turns or pace.turns
            for start in range(0, len(acting), most):
                # What is built first pays for libraries: not the one that the others are compared to.
                members = sorted(acting[start : start + most], key=lambda m: m.name != AGAIN)
                first = 1 if members[0].name == AGAIN else 0
                members.insert(first, _WITH_ALL)
                steps = _WARMUP + 1 + _NOMINAL_ROUNDS * turns
                expected = len(members) * (_BUILD_S + steps * pace.step_s)
                heats.append(Heat(workload, captured, tuple(members), turns, expected))
    return heats


class Benchmark:
    """One run: what it found, and the file that has it after every round."""

    def __init__(self, ranks: Ranks, settings: Settings, report: dict[str, Any], told: TextIO) -> None:
        """``told``: where stacks are written to when nothing goes on."""
        self.ranks = ranks
        self.settings = settings
        self.report = report
        self.memory = Memory(ranks.device)
        self.began = time.perf_counter()
        self._told = told

    def run(self) -> None:
        """All heats."""
        heats = heats_of(self.settings, self.ranks.device.type)
        for position, heat in enumerate(heats):
            ends = None
            if self.settings.seconds is not None:
                left = self.settings.seconds - self._elapsed()
                if self.ranks.decided(left < 0):
                    self._skip(heat, [m.name for m in heat.mechanisms], "the time was up")
                    continue
                share = heat.expected_s / sum(each.expected_s for each in heats[position:])
                ends = self._elapsed() + left * share
            self._heat(position, heat, ends)
            self.memory.settle()

    def _heat(self, number: int, heat: Heat, ends: float | None) -> None:
        self._watch()
        pool = [Batches(heat.workload, self.ranks.rank, self.ranks.device).batch(index) for index in range(_POOL)]
        runs: dict[str, _Run] = {}
        with ExitStack() as built:
            built.callback(self.memory.settle)
            for mechanism in heat.mechanisms:
                if not self._has_room(runs):
                    self._skip(heat, [mechanism.name], "the models before it left too little memory")
                    continue
                run = _Run(mechanism)
                built.callback(_drop, run)
                try:
                    found = self._build(run, heat, pool)
                    runs[mechanism.name] = run
                except FailedError as failure:
                    found = self._failed(run, failure)
                self.report["models"].append(self._of(number, heat, mechanism.name) | found)
                self._log(f"{heat.workload.name} {heat.mode}, without {mechanism.name}: {found}")
            self.write()
            with undisturbed():
                # Building gave everyone's cached memory back.
                self._turns(number, heat, runs, pool, 1)
                self._rounds(number, heat, runs, pool, ends)
            self._note_losses(number, runs)
            self._watch()
        self._log(f"{self._elapsed():5.0f} s  {heat.workload.name} {heat.mode} done")
        self.write()

    def _rounds(
        self,
        number: int,
        heat: Heat,
        runs: dict[str, _Run],
        pool: Sequence[tuple[torch.Tensor, torch.Tensor]],
        ends: float | None,
    ) -> None:
        longest = 0.0
        for index in range(self.settings.rounds):
            began = self._elapsed()
            late = ends is not None and index >= _FEWEST_ROUNDS and began + longest > ends
            if self.ranks.decided(late):
                break
            self._turns(number, heat, runs, pool, heat.turns)
            for name, run in runs.items():
                taken = run.taken[-heat.turns :]
                row: dict[str, Any] = self._of(number, heat, name) | {"round": index}
                for key in ("device", "host", "processor"):
                    slowest = self.ranks.largest([getattr(each, key) for each in taken])
                    row[f"{key}_ms"] = [round(value, 3) for value in slowest]
                self.report["rows"].append(row)
            longest = max(longest, self._elapsed() - began)

    def _note_losses(self, number: int, runs: Mapping[str, _Run]) -> None:
        for name, run in runs.items():
            losses = self.ranks.mean([loss.item() for loss in run.losses])
            model = next(m for m in self.report["models"] if (m["heat"], m["mechanism"]) == (number, name))
            model["losses"] = [round(loss, 6) for loss in losses]

    def _turns(
        self,
        number: int,
        heat: Heat,
        runs: dict[str, _Run],
        pool: Sequence[tuple[torch.Tensor, torch.Tensor]],
        turns: int,
    ) -> None:
        """Steps of everyone, in an order that rotates. Whoever fails is taken out of ``runs``."""
        names = list(runs)
        for turn in range(turns):
            self._watch()
            for position in range(len(names)):
                # What a model leaves behind, in caches say, meets another one each time.
                name = names[(turn + position) % len(names)]
                if name not in runs:
                    continue
                try:
                    self._advance(runs[name], pool)
                except FailedError as failure:
                    found = self._failed(runs.pop(name), failure)
                    self.report["models"].append(self._of(number, heat, name) | found)
                    self._log(f"{heat.workload.name} {heat.mode}, without {name}: {found}")

    def _build(self, run: _Run, heat: Heat, pool: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
        """Build and warm up, in memory that was settled; returns what it took. Raises ``FailedError``."""
        self._watch()
        memory, ranks = self.memory, self.ranks
        memory.reset_peaks()
        before, reserved_before = memory.allocated(), memory.reserved()
        began = time.perf_counter()
        peer = "polyshard-captured" if heat.captured else "polyshard"
        build = contender(f"{peer}:{run.mechanism.setting}").build
        with together(ranks), run.mechanism.switch():
            run.step = build(Site(heat.workload, ranks.device, ranks.rank, ranks.world_size, False))
            ranks.synchronize()
        wrap_s = time.perf_counter() - began
        first = None
        for index in range(_WARMUP):
            if index == _SETTLED:
                first = memory.peaks()
                memory.reset_peaks()
            self._advance(run, pool)
        peaks = memory.peaks()
        run.needs_gib = _less(_second(larger(first, peaks)), reserved_before) or 0.0
        return {
            "wrap_s": round(wrap_s, 4),
            "first_step_s": round(run.taken[0].device / 1e3, 4),
            "peak_gib": _rounded(_less(_first(peaks), before)),
            "reserved_gib": _rounded(_less(_second(peaks), reserved_before)),
            "kept_gib": _rounded(_less(memory.allocated(), before)),
        }

    def _advance(self, run: _Run, pool: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One more step. Raises ``FailedError``."""
        with together(self.ranks), run.mechanism.switch():
            assert run.step is not None
            taken, loss = timed(run.step, *pool[len(run.taken) % _POOL])
            run.taken.append(taken)
            run.losses.append(loss.clone())

    def _has_room(self, runs: Mapping[str, _Run]) -> bool:
        needed = max((run.needs_gib for run in runs.values()), default=0.0)
        self.memory.settle()
        free = self.memory.free()
        return not self.ranks.decided(free is not None and free < 1.05 * needed)

    def _watch(self) -> None:
        faulthandler.dump_traceback_later(self.settings.hang_timeout_s, exit=True, file=self._told)

    def _elapsed(self) -> float:
        return time.perf_counter() - self.began

    def _of(self, number: int, heat: Heat, mechanism: str) -> dict[str, Any]:
        return {"workload": heat.workload.name, "mode": heat.mode, "heat": number, "mechanism": mechanism}

    def _failed(self, run: _Run, failure: FailedError) -> dict[str, Any]:
        _drop(run)
        if failure.trace:
            print(f"{run.mechanism.name}, rank {self.ranks.rank}\n{failure.trace}", file=sys.stderr, flush=True)
        return {"error": failure.reason, "trace": failure.trace}

    def _skip(self, heat: Heat, names: list[str], reason: str) -> None:
        skipped = {"workload": heat.workload.name, "mode": heat.mode, "mechanisms": names, "reason": reason}
        self.report["skipped"].append(skipped)
        self._log(f"{heat.workload.name} {heat.mode}: {', '.join(names)} skipped, {reason}")
        self.write()

    def write(self) -> None:
        """Put what is known so far into the file."""
        self.report["elapsed_s"] = round(self._elapsed(), 1)
        self.report["summary"] = summarise(self.report)
        out = self.settings.out
        if out is not None and self.ranks.rank == 0:
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_suffix(".part")
            partial.write_text(_text(self.report), encoding="utf-8")
            partial.replace(out)

    def _log(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text[:500], file=sys.stderr, flush=True)


def _text(report: Mapping[str, Any]) -> str:
    """JSON, a line for each row: with one for each step nobody could read it."""
    lines = {key: ",\n  ".join(json.dumps(row) for row in report[key]) for key in ("models", "rows")}
    text = json.dumps({**report, **{key: [f"<{key}>"] for key in lines}}, indent=1)
    for key, listed in lines.items():
        text = text.replace(f'"<{key}>"', listed)
    return text + "\n"


def _drop(run: _Run) -> None:
    if run.step is not None:
        run.step.close()
    run.step = None


def _first(pair: tuple[float, float] | None) -> float | None:
    return None if pair is None else pair[0]


def _second(pair: tuple[float, float] | None) -> float | None:
    return None if pair is None else pair[1]


def _less(value: float | None, before: float | None) -> float | None:
    return None if value is None or before is None else value - before


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    listed = "\n".join(f"  {each.name}: {each.off}" for each in MECHANISMS)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"mechanisms, and what runs in the place of each:\n{listed}",
    )
    parser.add_argument("--work", default="host,300m,1b", help="workloads (default: %(default)s)")
    parser.add_argument(
        "--mechanisms",
        help="names, with semicolons between (default: all that the workload and the device have a use for)",
    )
    parser.add_argument("--modes", default="eager,captured", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a heat, at most (default: %(default)s)")
    parser.add_argument("--turns", type=int, help="steps of each model in a round (default: by workload)")
    parser.add_argument("--seconds", type=float, help="what heats divide among them (default: all rounds are made)")
    parser.add_argument("--hang-timeout", type=float, default=60.0, help="seconds for one model, or one turn of all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="recorded instead of what git says")
    parser.add_argument("--out", type=Path, help="write everything as JSON, after every round")
    return parser


def settings_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Settings:
    """What ``given`` asks for. Leaves the program, saying why, where that cannot be."""
    known = {each.name: each for each in MECHANISMS}
    modes = {"eager": False, "captured": True}
    work, names = given.work.split(","), given.mechanisms.split(";") if given.mechanisms else list(known)
    for asked, there, what in (
        (work, WORKLOADS, "workload"),
        (names, known, "mechanism"),
        (given.modes.split(","), modes, "mode"),
    ):
        unknown = [name for name in asked if name not in there]
        if unknown:
            parser.error(f"no {what} is called {unknown[0]!r}. There are: {', '.join(there)}.")
    if given.rounds < 1 or (given.turns is not None and given.turns < 1):
        parser.error("--rounds and --turns must be at least 1.")
    return Settings(
        tuple(WORKLOADS[name] for name in work),
        tuple(known[name] for name in names),
        tuple(modes[mode] for mode in given.modes.split(",")),
        given.rounds,
        given.turns,
        given.seconds,
        given.hang_timeout,
        given.out,
    )


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = make_parser()
    given = parser.parse_args()
    settings = settings_of(parser, given)
    if "RANK" not in os.environ:
        # Not an error: all benchmarks may be run one after the other, each by itself.
        print("nothing measured: start it with torchrun, see --help", file=sys.stderr)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: no CUDA device is there; --device cpu --work tiny tries the program", file=sys.stderr)
        return 2
    # A warning that is shown costs more than what is measured here.
    warnings.simplefilter("ignore")
    if given.device == "cpu":
        torch.set_num_threads(1)
    ranks = Ranks(given.device, timedelta(seconds=2 * settings.hang_timeout_s))
    report: dict[str, Any] = {
        "environment": environment(ranks, "mechanisms.py", given.commit),
        "settings": {
            "work": {work.name: work.describe() for work in settings.workloads},
            "off": {each.name: each.off for each in settings.mechanisms},
            "rounds": settings.rounds,
            "warmup": _WARMUP,
            "seconds": settings.seconds,
        },
        "models": [],
        "rows": [],
        "skipped": [],
    }
    with ExitStack() as files:
        told: TextIO = sys.stderr
        if settings.out is not None:
            # Beside the figures: whoever started it may see nothing else.
            settings.out.parent.mkdir(parents=True, exist_ok=True)
            stacks = settings.out.with_suffix(f".rank{ranks.rank}.txt")
            told = files.enter_context(stacks.open("w", encoding="utf-8"))
        benchmark = Benchmark(ranks, settings, report, told)
        try:
            benchmark.run()
        except Exception:
            traceback.print_exc(file=told)
            raise
        finally:
            benchmark.write()
        if ranks.rank == 0:
            print(table(report["summary"]), flush=True)
        faulthandler.dump_traceback_later(settings.hang_timeout_s, exit=True, file=told)
        ranks.close()
        faulthandler.cancel_dump_traceback_later()
        if settings.out is not None:
            # There was nothing to say.
            stacks.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
