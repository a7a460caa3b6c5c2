"""What offloading costs: steps of one model without offload, with some units offloaded, and with all of them.

    torchrun --standalone --nproc-per-node 2 benchmarks/offload.py --out benchmarks/results/offload.json
    torchrun --standalone --nproc-per-node 2 benchmarks/offload.py --device cpu --work tiny --rounds 2 --turns 1

Models take turns within each round, so that a busy host hits all alike. A round's figure is the median of its steps,
and its ratio that to the same round's model without offload; the table has medians over rounds, quartiles in brackets.
Parts of the device are of what all masters, gradients and AdamW's state take there. "Optimizer" is the host's time in
the optimizer's step alone. The optimizer is torch's fused AdamW, whose offloaded part the host's threads update:
torchrun lets a process have one, so ``--threads`` sets them. On the CPU, host and device are one: a trial run, which
says nothing.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polyshard
import torch
from contenders import Site, adamw
from measure import spread, turned, undisturbed, write
from memory import Memory
from ranks import Ranks
from runs import FailedError, environment, job, make_parser, not_started, timed, together
from torch import nn
from workloads import WORKLOADS, Batches, Block, Workload, initializer, meta_model

_NONE = "none"
#: Parts of the device's share that may stay, in per cent.
_PARTS = (75, 50, 25)
#: Bytes of a parameter: master, gradient and two states, in fp32.
_NBYTES = 4 * 4
_POOL = 8
_WARMUP = 3
_HANG_S = 150.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    offload: Any


@dataclass
class OffloadedStep:
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


@dataclass
class Run:
    """A model while it is there, and its figures."""

    case: Case
    step: OffloadedStep | None = None
    offloaded: int = 0
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
    for inner in ("cpu", "optimizer"):
        kept = "" if inner == "cpu" else ", slices kept"
        for part in _PARTS:
            options = {"name": "partial", "device_bytes": whole * part // 100, "inner": inner}
            cases.append(Case(f"{part} % here{kept}", options))
        cases.append(Case(f"nothing here{kept}", inner))
    if asked is None:
        return cases
    known = {case.name: case for case in cases}
    for name in asked:
        if name not in known:
            raise ValueError(f"no case is called {name!r}. There are: {'; '.join(known)}.")
    return [case for case in cases if case.name in asked or case.name == _NONE]


def build(case: Case, site: Site) -> OffloadedStep:
    """The model, sharded from the meta device with its first values, and AdamW over it."""
    model = meta_model(site.workload)
    config = polyshard.ShardConfig(
        precision="bf16",
        policy={"name": "module_class", "classes": [Block]},
        offload=case.offload,
        device=site.device,
    )
    polyshard.shard(model, config, initializer=initializer(model))
    return OffloadedStep(model, adamw(polyshard.flat_parameters(model)))


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
        run.offloaded, run.units = len(report.offloaded), report.units
        for index in range(_WARMUP):
            # Of a step behind those in which buffers, and the optimizer's state, are made.
            self._memory.reset_peaks()
            run.loss = float(run.step(*self._pool[index]))
        after, peaks = self._memory.allocated(), self._memory.peaks()
        if before is not None and after is not None and peaks is not None:
            run.resident_gib, run.peak_gib = after - before, peaks[0] - before

    def _round(self, number: int) -> None:
        # What comes behind an offloaded step finds the host's caches full.
        for run in [each for each in turned(self.runs, number) if each.step is not None]:
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

    @contextmanager
    def _or_drop(self, run: Run) -> Iterator[None]:
        """Note that a case failed, on all ranks, and let go of its model."""
        try:
            yield
        except FailedError as error:
            run.error = error.reason
            if error.trace:
                print(f"{run.case.name}\n{error.trace}", file=sys.stderr, flush=True)
            run.step = None
            self._memory.settle()

    def rows(self) -> list[dict[str, Any]]:
        """A case each, with everything that is known of it."""
        base = self.runs[0].medians
        rows = []
        for run in self.runs:
            row: dict[str, Any] = {"case": run.case.name, "parked": run.offloaded, "units": run.units}
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


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of a table for people."""
    yield "| stays | units offloaded | step, ms | over none | optimizer, ms | between steps, GiB | peak, GiB | loss |"
    yield "|---" * 8 + "|"
    for row in rows:
        offloaded = f"{row['parked']} of {row['units']}"
        if "error" in row:
            yield f"| {row['case']} | {offloaded} | {row['error'].splitlines()[0][:80]} | | | | | |"
            continue
        ratio = row.get("over_none")
        over = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
        yield (
            f"| {row['case']} | {offloaded} | {row['step_ms']['median']:.1f} | {over} | "
            f"{row['optimizer_ms']['median']:.1f} | {row.get('resident_gib', '')} | {row.get('peak_gib', '')} | "
            f"{row['loss']:.4f} |"
        )


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", choices=sorted(WORKLOADS), default="1b", help="workload (default: %(default)s)")
    parser.add_argument("--cases", help="names, with semicolons between (default: all)")
    parser.add_argument("--rounds", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="steps of each model in a round (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of each process (default: the host's cores over its ranks)")
    given = parser.parse_args()
    code = not_started(given)
    if code is not None:
        return code
    world_size = int(os.environ["WORLD_SIZE"])
    workload = WORKLOADS[given.work]
    try:
        cases = cases_of(workload, world_size, given.cases.split(";") if given.cases else None)
    except ValueError as error:
        parser.error(str(error))
    threads = given.threads or max(1, (os.cpu_count() or 1) // world_size)
    with job(given, _HANG_S) as ranks:
        torch.set_num_threads(threads)
        benchmark = Benchmark(ranks, workload, cases, given.rounds, given.turns)
        benchmark.run()
        rows = benchmark.rows()
        asked = {"workload": workload.describe(), "threads": threads, "rounds": given.rounds, "turns": given.turns}
        write(environment(ranks, "offload.py", given.commit) | asked | {"rows": rows}, given.out, ranks.rank)
        if ranks.rank == 0:
            print("\n".join(table(rows)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
