"""polyshard beside DDP, FSDP1, FSDP2, Megatron-FSDP, DeepSpeed and compute alone: one model, one run, peers in turn.

    torchrun --standalone --nproc-per-node 4 benchmarks/peers.py --rounds 3 --out benchmarks/results/peers.json
    torchrun --standalone --nproc-per-node 2 benchmarks/peers.py --train 1000 --every 100 --out train.json
    torchrun --standalone --nproc-per-node 2 benchmarks/peers.py --device cpu --work tiny
    python benchmarks/peers.py --pretend 8 --peers fsdp2,drop-in,drop-in-local,polyshard --work host,300m,1b
    python benchmarks/peers.py --pretend 8 --work 8b-selective --kernels --peers fsdp2+compile,polyshard+compile
    torchrun --standalone --nproc-per-node 2 benchmarks/peers.py --by-step --work 1b --rounds 6 --steps 3 \\
        --peers polyshard,polyshard:without=nothing,polyshard:without=buckets,polyshard:split_root=false

In every round, each peer of a workload is built from the meta device, warmed up, timed and dropped. With ``--by-step``
all of them are built and warmed up, then take turns step by step, and are dropped together. Ratios are taken within a
round. All start from the same weights and see the same batches, so their losses agree. A step is forward, backward,
fused AdamW and zero_grad(); its time lies between two CUDA events and is the slowest rank's; host time ends when the
last call returns. Ranks meet between steps. All sharders compute in bf16, keep fp32 parameters and reduce in fp32; DDP
computes under bf16 autocast. Memory is a peer's own: what earlier ones left allocated or reserved is taken off.

The last command says what mechanisms of the engine's fast path gain: "polyshard / it" is the time with one over the
time without it, and below 1 where it pays; ``without=nothing`` lacks none, so that its ratio is noise.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender, Site, Step
from measure import spread, turned, undisturbed, write
from memory import Memory, larger
from options import Settings, make_parser, settings_of
from ranks import Ranks
from runs import (
    FailedError,
    Taken,
    compute_deterministically,
    environment,
    job,
    kernels_of,
    not_started,
    timed,
    together,
)
from summary import kernel_tables, summarise, table, train_table
from workloads import Batches, Workload

#: Batches that a timed peer goes round.
_POOL = 8
#: Of dense bf16 products a second, on an H100 or H200: what MFU is a share of.
_PEAK_FLOPS = 989e12


class Benchmark:
    """One run: its rows, and the file that has them after every peer."""

    def __init__(self, ranks: Ranks, settings: Settings, report: dict[str, Any]) -> None:
        self.ranks = ranks
        self.settings = settings
        self.report = report
        self.memory = Memory(ranks.device)
        self.profiled: set[tuple[str, str]] = set()
        self.began = time.perf_counter()

    def run(self) -> None:
        """All rounds. Rounds come first and workloads second, so that a run cut short has rows of every workload."""
        taken: dict[str, float] = {}
        for number in range(self.settings.rounds):
            for workload in self.settings.workloads:
                if self._late(taken.get(workload.name, 0.0)):
                    self._skip(workload, number, [peer.name for peer in self.settings.contenders])
                    continue
                began = time.perf_counter()
                order = turned(self.settings.contenders, number)
                if self.settings.by_step:
                    self._round_by_step(order, workload, number)
                else:
                    self._round(order, workload, number)
                taken[workload.name] = time.perf_counter() - began

    def _round(self, order: Sequence[Contender], workload: Workload, number: int) -> None:
        for position, peer in enumerate(order):
            if self._late(0.0):
                self._skip(workload, number, [left.name for left in order[position:]])
                break
            profiles = self.settings.kernels and (workload.name, peer.name) not in self.profiled
            timed = self._guarded(peer, workload, lambda run: self._timed(run, workload, profiles))  # noqa: B023
            self.profiled.add((workload.name, peer.name))
            self._add({"workload": workload.name, "peer": peer.name, "round": number, **timed})

    def _round_by_step(self, order: Sequence[Contender], workload: Workload, number: int) -> None:
        pool = self._pool(workload)
        done: dict[str, dict[str, Any]] = {}
        runs: dict[str, _Run] = {}
        with ExitStack() as built:
            for peer in order:
                try:
                    run = built.enter_context(self._built(peer, workload))
                    for _ in range(self.settings.warmup):
                        self._advance(run, pool)
                    runs[peer.name] = run
                except FailedError as failure:
                    done[peer.name] = self._failed(peer.name, failure)
            names = list(runs)
            with undisturbed():
                for index in range(self.settings.steps_of(workload)):
                    for name in turned(names, index) if names else ():
                        if name in done:
                            continue
                        faulthandler.dump_traceback_later(self.settings.hang_timeout_s, exit=True)
                        try:
                            self._advance(runs[name], pool)
                        except FailedError as failure:
                            done[name] = self._failed(name, failure)
            # In one order on all ranks: figures are what they agree on.
            for name, run in runs.items():
                if name not in done:
                    done[name] = {**self._figures(run, workload), "wrap_s": round(run.wrap_s, 4)}
        for peer in order:
            self._add({"workload": workload.name, "peer": peer.name, "round": number, **done[peer.name]})

    def train(self, steps: int, every: int) -> None:
        """Every peer trains the first workload from the same start on fresh batches."""
        workload = self.settings.workloads[0]
        curves: dict[str, Any] = {}
        self.report["train"] = {"workload": workload.name, "steps": steps, "every": every, "peers": curves}
        for peer in self.settings.contenders:
            curves[peer.name] = self._guarded(peer, workload, lambda run: self._curve(run, workload, steps, every))
            self._log(f"{peer.name}: {curves[peer.name].get('error', curves[peer.name].get('losses'))}")
            self.write()

    def write(self) -> None:
        """Put what is known so far into the file."""
        self.report["elapsed_s"] = round(time.perf_counter() - self.began, 1)
        self.report["summary"] = summarise(self.report["rows"])
        write(self.report, self.settings.out, self.ranks.rank)

    def _late(self, needed_s: float) -> bool:
        deadline = self.settings.deadline_s
        if deadline is None:
            return False
        return self.ranks.decided(time.perf_counter() - self.began + needed_s > deadline)

    def _skip(self, workload: Workload, number: int, names: list[str]) -> None:
        reason = f"the deadline of {self.settings.deadline_s:g} s was near"
        self.report["skipped"].append({"workload": workload.name, "round": number, "peers": names, "reason": reason})
        self._log(f"round {number}, {workload.name}: {', '.join(names)} skipped, {reason}")
        self.write()

    def _add(self, row: dict[str, Any]) -> None:
        self.report["rows"].append(row)
        self.write()
        peaks = "" if row.get("peak_gib") is None else f"peak {row['peak_gib']:.2f} and "
        peaks += "" if row.get("peak_reserved_gib") is None else f"reserved {row['peak_reserved_gib']:.2f} GiB, "
        told = row.get("error") or (
            f"{row['ms']['median']:.2f} ms, host {row['host_ms']['median']:.2f} ms, {peaks}"
            f"wrap {row['wrap_s']:.2f} s, first step {row['first_step_s']:.2f} s, "
            f"loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
        )
        elapsed = time.perf_counter() - self.began
        self._log(f"{elapsed:5.0f} s  round {row['round']}  {row['workload']:5} {row['peer']:24} {told[:500]}")

    def _log(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def _guarded(self, peer: Contender, workload: Workload, use: Callable[[_Run], dict[str, Any]]) -> dict[str, Any]:
        """Build ``peer``, use it, drop it. Errors become a row: the same one on every rank."""
        try:
            with self._built(peer, workload) as run:
                return {**use(run), "wrap_s": round(run.wrap_s, 4)}
        except FailedError as failure:
            return self._failed(peer.name, failure)

    def _failed(self, peer: str, failure: FailedError) -> dict[str, Any]:
        if failure.trace:
            # Every rank's own: launchers keep them apart, and ranks may have failed for different reasons.
            print(f"{peer}, rank {self.ranks.rank}\n{failure.trace}", file=sys.stderr, flush=True)
        return {"error": failure.reason}

    @contextmanager
    def _built(self, peer: Contender, workload: Workload) -> Iterator[_Run]:
        """``peer``, which is dropped at the end. Raises ``FailedError``."""
        faulthandler.dump_traceback_later(self.settings.hang_timeout_s, exit=True)
        if peer.compiled:
            torch._dynamo.reset()
        self.memory.settle()
        self.memory.reset_peaks()
        groups = _groups()
        run = _Run(peer, (self.memory.allocated() or 0.0, self.memory.reserved() or 0.0))
        try:
            began = time.perf_counter()
            ranks = self.ranks
            site = Site(workload, ranks.device, ranks.rank, ranks.world_size, peer.compiled)
            with together(self.ranks), peer.switch():
                run.step = peer.build(site)
                ranks.synchronize()
            run.wrap_s = time.perf_counter() - began
            yield run
        finally:
            if run.step is not None:
                run.step.close()
            run.step = None
            self.memory.settle()
            if not peer.captured:
                # Destroying a communicator waits for graphs that captured its operations, which may outlive the peer.
                for group in _groups():
                    if group not in groups:
                        dist.destroy_process_group(group)
            faulthandler.cancel_dump_traceback_later()

    def _pool(self, workload: Workload) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        batches = Batches(workload, self.ranks.rank, self.ranks.device)
        return [batches.batch(index) for index in range(_POOL)]

    def _timed(self, run: _Run, workload: Workload, profiles: bool) -> dict[str, Any]:
        """Warm up, then time; see the head of this file. ``profiles``: one more step under the profiler."""
        steps, warmup = self.settings.steps_of(workload), self.settings.warmup
        pool = self._pool(workload)
        whole = self.memory.peaks()
        # What building left behind is not part of any step.
        self.memory.settle()
        self.memory.reset_peaks()
        retries = self.memory.retries()
        reserved_after_2 = self.memory.reserved()
        compiled, compiled_in_2 = _graphs(), 0
        with undisturbed():
            for index in range(warmup + steps):
                self._advance(run, pool)
                if index < 2:
                    compiled_in_2 = _graphs() - compiled
                    # The second step is the first that has optimizer state from its beginning.
                    reserved_after_2 = self.memory.reserved()
                    whole = larger(whole, self.memory.peaks())
                    self.memory.reset_peaks()
        steady = self.memory.peaks()
        whole = larger(whole, steady)
        allocated, reserved = run.left
        found = self._figures(run, workload) | {
            "peak_gib": _above(allocated, steady and steady[0]),
            "peak_reserved_gib": _above(reserved, steady and steady[1]),
            "whole_peak_gib": _above(allocated, whole and whole[0]),
            "whole_peak_reserved_gib": _above(reserved, whole and whole[1]),
            "reserved_after_step_2_gib": _above(reserved, reserved_after_2),
            "reserved_at_end_gib": _above(reserved, self.memory.reserved()),
            "left_gib": _rounded(reserved),
            "device_used_gib": _rounded(self.memory.used()),
            "alloc_retries": self.memory.retries() - retries,
        }
        if run.peer.compiled:
            found |= {"graphs": _graphs() - compiled, "graphs_in_2_steps": compiled_in_2}
        if profiles:
            with together(self.ranks):
                assert run.step is not None
                found["kernels"] = kernels_of(run.step, *pool[0])
        return found

    def _figures(self, run: _Run, workload: Workload) -> dict[str, Any]:
        times = run.times[self.settings.warmup :]
        ms = self.ranks.largest([taken.device for taken in times])
        host = self.ranks.largest([taken.host for taken in times])
        return {
            "ms": {**spread(ms), "steps": [round(value, 4) for value in ms]},
            "host_ms": {**spread(host), "steps": [round(value, 4) for value in host]},
            "tokens_per_s": round(workload.tokens / spread(ms)["median"] * 1e3, 1),
            "mfu": round(workload.flops_per_token * workload.tokens / spread(ms)["median"] * 1e3 / _PEAK_FLOPS, 4),
            "first_step_s": round(run.times[0].device / 1e3, 4),
            "losses": [round(value, 6) for value in self.ranks.mean([loss.item() for loss in run.losses])],
        }

    def _advance(self, run: _Run, pool: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One more step. Raises ``FailedError``."""
        with together(self.ranks), run.peer.switch():
            assert run.step is not None
            taken, loss = timed(run.step, *pool[len(run.times) % _POOL])
            run.times.append(taken)
            run.losses.append(loss.clone())

    def _curve(self, run: _Run, workload: Workload, steps: int, every: int) -> dict[str, Any]:
        step = run.step
        assert step is not None
        batches = Batches(workload, self.ranks.rank, self.ranks.device)
        at: list[int] = []
        losses: list[float] = []
        reserved: list[float | None] = []
        self.memory.settle()
        began = time.perf_counter()
        for first, last in _stretches(steps, every):
            faulthandler.dump_traceback_later(self.settings.hang_timeout_s, exit=True)
            with together(self.ranks):
                for index in range(first, last):
                    loss = step(*batches.batch(index))
                value = loss.item()
            at.append(last)
            losses.append(self.ranks.mean([value])[0])
            reserved.append(_rounded(self.memory.reserved()))
        return {
            "at": at,
            "losses": losses,
            "reserved_gib": reserved,
            "seconds": round(time.perf_counter() - began, 2),
            "alloc_retries": self.memory.retries(),
        }


@dataclass
class _Run:
    """A peer while it is there, and what its steps took."""

    peer: Contender
    #: GiB allocated and reserved before it was there: graphs of earlier peers may not be given back.
    left: tuple[float, float]
    step: Step | None = None
    #: Seconds of wall time that it took to build.
    wrap_s: float = 0.0
    #: Step by step.
    times: list[Taken] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)


def _stretches(steps: int, every: int) -> list[tuple[int, int]]:
    """From and to which step to go without a stop: to 3, where memory has settled, then to multiples of ``every``."""
    stops = sorted({min(3, steps), *range(every, steps + 1, every), steps})
    return list(zip([0, *stops], stops, strict=False))


def _groups() -> list[dist.ProcessGroup]:
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)


def _graphs() -> int:
    """How many graphs were compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _above(left: float, value: float | None) -> float | None:
    return None if value is None else round(value - left, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = make_parser(__doc__)
    given = parser.parse_args()
    settings = settings_of(parser, given)
    code = not_started(given)
    if code is not None:
        return code
    if given.deterministic:
        compute_deterministically()
    with job(given, settings.hang_timeout_s) as ranks:
        report: dict[str, Any] = {
            "environment": environment(ranks, "peers.py", given.commit),
            "settings": {
                "work": {work.name: work.describe() for work in settings.workloads},
                "peers": [peer.name for peer in settings.contenders],
                "rounds": settings.rounds,
                "steps": {work.name: settings.steps_of(work) for work in settings.workloads},
                "warmup": settings.warmup,
                "deadline_s": settings.deadline_s,
                "by_step": settings.by_step,
            },
        }
        measure(ranks, settings, report, given.train, given.every)
    return 0


def measure(ranks: Ranks, settings: Settings, report: dict[str, Any], train: int | None, every: int) -> None:
    """Time all peers, or compare losses over ``train`` steps; puts what is found into ``report`` and prints it."""
    report |= {"rows": [], "skipped": []}
    benchmark = Benchmark(ranks, settings, report)
    if train:
        benchmark.train(train, every)
        text = train_table(report["train"])
    else:
        benchmark.run()
        text = table(report["summary"]) + kernel_tables(report["rows"])
    if ranks.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
