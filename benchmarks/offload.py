"""What parking costs: steps of one model without offload, with some units parked, and with all of them.

    torchrun --standalone --nproc-per-node 2 benchmarks/offload.py --out benchmarks/results/offload.json
    torchrun --standalone --nproc-per-node 2 benchmarks/offload.py --device cpu --work tiny --rounds 2 --turns 1

Models take turns within each round, so that a busy host hits all alike. A round's figure is the median of its steps,
and its ratio that to the same round's model without offload; the table has medians over rounds, quartiles in brackets.
Parts of the device are of what all masters, gradients and AdamW's state take there. "Optimizer" is the host's time in
the optimizer's step alone. The optimizer is torch's fused AdamW, whose parked part the host's threads update: torchrun
lets a process have one, so ``--threads`` sets them. On the CPU, host and device are one: a trial run, which says
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import polyshard
import torch
from contenders import Site
from measure import spread, undisturbed
from memory import Memory
from ranks import Ranks
from runs import FailedError, environment, timed, together
from torch import nn
from workloads import WORKLOADS, Batches, Block, LanguageModel, Workload, initial_value

_NONE = "none"
#: Parts of the device's share that may stay, in per cent.
_PARTS = (75, 50, 25)
#: Bytes of a parameter: master, gradient and two states, in fp32.
_NBYTES = 4 * 4
_POOL = 8
_WARMUP = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One way to park."""

    name: str
    offload: Any


@dataclass
class ParkedStep:
    """A step, and how long the host was in the optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_ms: list[float] = field(default_factory=list)

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Tokens and next tokens, ``[batch, seq]``, to the loss."""
        loss: torch.Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer_ms.append((time.perf_counter() - began) * 1e3)
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """Nothing to do."""


@dataclass
class Run:
    """A model while it is there, and its figures."""

    case: Case
    step: ParkedStep | None = None
    parked: int = 0
    units: int = 0
    medians: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    resident_gib: float | None = None
    """What the model and its optimizer hold on the device between steps; None where nothing says so."""
    peak_gib: float | None = None
    """What they and a step take there at most."""
    loss: float = 0.0
    error: str = ""


def cases_of(workload: Workload, world_size: int, asked: Sequence[str] | None) -> list[Case]:
    """All cases, or those that were ``asked`` for and the one that they are compared to.

    Raises ``ValueError`` for a name that means none.
    """
    whole = workload.parameter_count * _NBYTES // world_size
    cases = [Case(_NONE, "none")]
    for keep in ("nothing", "compute"):
        kept = "" if keep == "nothing" else ", slices kept"
        for part in _PARTS:
            options = {"name": "partial", "device_bytes": whole * part // 100, "keep": keep}
            cases.append(Case(f"{part} % here{kept}", options))
        everything = "cpu" if keep == "nothing" else {"name": "partial", "units": "*", "keep": keep}
        cases.append(Case(f"nothing here{kept}", everything))
    if asked is None:
        return cases
    known = {case.name: case for case in cases}
    for name in asked:
        if name not in known:
            raise ValueError(f"no case is called {name!r}. There are: {'; '.join(known)}.")
    return [case for case in cases if case.name in asked or case.name == _NONE]


def build(case: Case, site: Site) -> ParkedStep:
    """The model, sharded from the meta device with its first values, and AdamW over it."""
    with torch.device("meta"):
        model = LanguageModel(site.workload)
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}

    def initialize(module: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(initial_value(names[module] + name, parameter.shape, parameter.device))

    config = polyshard.ShardConfig(
        precision="bf16",
        policy={"name": "module_class", "classes": [Block]},
        offload=case.offload,
        device=site.device,
    )
    polyshard.shard(model, config, initializer=initialize)
    parameters = polyshard.flat_parameters(model)
    return ParkedStep(model, torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True))


class Benchmark:
    """One run over all cases of one workload."""

    def __init__(self, ranks: Ranks, workload: Workload, cases: Sequence[Case], rounds: int, turns: int) -> None:
        self._ranks = ranks
        self._site = Site(workload, ranks.device, ranks.rank, ranks.world_size, compiled=False)
        self._rounds = rounds
        self._turns = turns
        self._memory = Memory(ranks.device)
        self._pool = [Batches(workload, ranks.rank, ranks.device).batch(index) for index in range(_POOL)]
        self._taken = 0
        self.runs = [Run(case) for case in cases]

    def run(self) -> None:
        """Build, warm up, and let models take turns."""
        for run in self.runs:
            with self._or_drop(run), together(self._ranks):
                self._begin(run)
        with undisturbed():
            for number in range(self._rounds):
                self._round(number)

    def _begin(self, run: Run) -> None:
        self._memory.settle()
        before = self._memory.allocated()
        run.step = build(run.case, self._site)
        report = polyshard.report(run.step.model)
        run.parked, run.units = len(report.parked), report.units
        for index in range(_WARMUP):
            # Of a step behind those in which buffers, and the optimizer's state, are made.
            self._memory.reset_peaks()
            run.loss = float(run.step(*self._pool[index]))
        after, peaks = self._memory.allocated(), self._memory.peaks()
        if before is not None and after is not None and peaks is not None:
            run.resident_gib, run.peak_gib = after - before, peaks[0] - before

    def _round(self, number: int) -> None:
        # Another one begins each time: what comes behind a parked step finds the host's caches full.
        turned = self.runs[number % len(self.runs) :] + self.runs[: number % len(self.runs)]
        for run in [each for each in turned if each.step is not None]:
            with self._or_drop(run), together(self._ranks):
                assert run.step is not None
                taken = []
                run.step.optimizer_ms.clear()
                for index in range(self._turns):
                    found, loss = timed(run.step, *self._pool[index % _POOL])
                    taken.append(found.device)
                run.loss = float(loss)
                median, optimizer = self._ranks.largest(
                    [statistics.median(taken), statistics.median(run.step.optimizer_ms)]
                )
                run.medians.append(median)
                run.optimizer.append(optimizer)

    def _or_drop(self, run: Run) -> _Dropping:
        return _Dropping(run, self._memory)

    def rows(self) -> list[dict[str, Any]]:
        """A case each, with everything that is known of it."""
        base = self.runs[0].medians
        rows = []
        for run in self.runs:
            row: dict[str, Any] = {"case": run.case.name, "parked": run.parked, "units": run.units}
            if run.error or not run.medians:
                rows.append(row | {"error": run.error or "no round was made"})
                continue
            ratios = [mine / theirs for mine, theirs in zip(run.medians, base, strict=False)]
            row |= {"step_ms": spread(run.medians), "optimizer_ms": spread(run.optimizer), "loss": round(run.loss, 4)}
            row |= {"over_none": spread(ratios)} if ratios else {}
            if run.resident_gib is not None and run.peak_gib is not None:
                row |= {"resident_gib": round(run.resident_gib, 3), "peak_gib": round(run.peak_gib, 3)}
            rows.append(row)
        return rows


class _Dropping:
    """Notes that a case failed, on all ranks, and lets go of its model."""

    def __init__(self, run: Run, memory: Memory) -> None:
        self._run = run
        self._memory = memory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, FailedError):
            return False
        self._run.error = error.reason
        if error.trace:
            print(f"{self._run.case.name}\n{error.trace}", file=sys.stderr, flush=True)
        self._run.step = None
        self._memory.settle()
        return True


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| stays | units parked | step, ms | over none | optimizer, ms | between steps, GiB | peak, GiB | loss |"
    yield "|---" * 8 + "|"
    for row in rows:
        parked = f"{row['parked']} of {row['units']}"
        if "error" in row:
            yield f"| {row['case']} | {parked} | {row['error'].splitlines()[0][:80]} | | | | | |"
            continue
        ratio = row.get("over_none")
        over = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
        yield (
            f"| {row['case']} | {parked} | {row['step_ms']['median']:.1f} | {over} | "
            f"{row['optimizer_ms']['median']:.1f} | {row.get('resident_gib', '')} | {row.get('peak_gib', '')} | "
            f"{row['loss']:.4f} |"
        )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=sorted(WORKLOADS), default="1b", help="workload (default: %(default)s)")
    parser.add_argument("--cases", help="names, with semicolons between (default: all)")
    parser.add_argument("--rounds", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="steps of each model in a round (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each process (default: the host's cores over its ranks)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="recorded instead of what git says")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    return parser


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = make_parser()
    given = parser.parse_args()
    if given.rounds < 1 or given.turns < 1:
        parser.error("--rounds and --turns must be at least 1.")
    if "RANK" not in os.environ:
        # Not an error: all benchmarks may be run one after the other, each by itself.
        print("nothing measured: start it with torchrun, see --help", file=sys.stderr)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: no CUDA device is there; --device cpu --work tiny tries the program", file=sys.stderr)
        return 2
    world_size = int(os.environ["WORLD_SIZE"])
    workload = WORKLOADS[given.work]
    try:
        cases = cases_of(workload, world_size, given.cases.split(";") if given.cases else None)
    except ValueError as error:
        parser.error(str(error))
    threads = given.threads or max(1, (os.cpu_count() or 1) // world_size)
    torch.set_num_threads(threads)
    ranks = Ranks(given.device, timedelta(minutes=5))
    benchmark = Benchmark(ranks, workload, cases, given.rounds, given.turns)
    benchmark.run()
    rows = benchmark.rows()
    if ranks.rank == 0:
        report = environment(ranks, "offload.py", given.commit) | {
            "workload": workload.describe(),
            "threads": threads,
            "rounds": given.rounds,
            "turns": given.turns,
            "rows": rows,
        }
        if given.out is not None:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(table(rows), flush=True)
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
