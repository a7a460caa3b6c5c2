"""Jobs that train together, each started again when a rank of it ends; the lighthouse; and what all wrote down."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
from elastic_rank import CLIP, ROWS, At, Places, Plan, batch, build, loss_of, optimizer_of, replay, run_rank
from processes import run_processes


def _serve_lighthouse(options: dict[str, Any]) -> None:
    """What ``torchft_lighthouse`` does; the command's own arguments are those of its file."""
    from torchft.coordination import LighthouseServer

    # It writes a line for every question.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    _server = LighthouseServer(**options)
    threading.Event().wait()


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


class Lighthouse:
    """torchft's server, in a process of its own."""

    def __init__(self, min_replicas: int = 1) -> None:
        self._port = free_port()
        self._min_replicas = min_replicas
        self._process: BaseProcess | None = None
        self.start()

    @property
    def address(self) -> str:
        """For jobs."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Also behind ``kill``, at the same address."""
        options = {
            "bind": f"[::]:{self._port}",
            "min_replicas": self._min_replicas,
            "heartbeat_timeout_ms": 1500,
            "join_timeout_ms": 1000,
            "quorum_tick_ms": 50,
        }
        process: BaseProcess = _context().Process(target=_serve_lighthouse, args=(options,), daemon=True)
        process.start()
        self._process = process
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
                return
            time.sleep(0.05)
        raise AssertionError(f"the lighthouse did not begin to listen; its exit code is {process.exitcode}")

    def kill(self) -> None:
        """As a host does that loses power."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("elastic_rank", "polyshard.setup.shard", "polyshard_backends.gloo", "polyshard_policies.module_class"),
            "polyshard_torchft",
        ]
    )
    return context


class Jobs:
    """The jobs of one plan. A context manager, which leaves no process behind."""

    def __init__(self, plan: Plan) -> None:
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.plan = plan
        self.places = Places(plan)
        self._ranks: dict[int, list[BaseProcess]] = {}
        self.lives = [0] * plan.jobs
        self._held: set[int] = set()
        self._guard = threading.RLock()
        self._over = threading.Event()
        self.failures: list[str] = []
        for job in range(plan.jobs):
            self.start(job)
        self._watch = threading.Thread(target=self._restart, daemon=True)
        self._watch.start()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()
        for job in range(self.plan.jobs):
            self.kill(job)

    def start(self, job: int) -> None:
        """Its ranks, anew."""
        with self._guard:
            self._held.discard(job)
            self.lives[job] += 1
            store = self.plan.folder / f"store-{uuid.uuid4().hex}"
            arguments = [(job, rank, self.lives[job], self.plan, store) for rank in range(self.plan.size)]
            for rank in range(self.plan.size):
                self.places.tell(job, rank, 0, At.START, 0)
            self._ranks[job] = [_context().Process(target=run_rank, args=each) for each in arguments]
            for process in self._ranks[job]:
                process.start()

    def _restart(self) -> None:
        # As torchrun: where one rank of a job has ended, the others are ended, and all are started again.
        while not self._over.wait(0.05):
            with self._guard:
                for job, ranks in list(self._ranks.items()):
                    codes = [each.exitcode for each in ranks]
                    if job in self._held or all(code in (None, 0) for code in codes):
                        continue
                    self._end(job)
                    self.start(job)

    def _end(self, job: int) -> None:
        for process in self._ranks.get(job, []):
            if process.is_alive():
                process.kill()
            process.join()

    def kill(self, job: int, *, hold: bool = True) -> None:
        """All of its ranks at once; ``hold``: it is not started again by itself."""
        with self._guard:
            if hold:
                self._held.add(job)
            for process in self._ranks[job]:
                if process.is_alive():
                    process.kill()
            if hold:
                self._end(job)

    def signal(self, job: int, rank: int, number: int) -> None:
        """Send one rank a signal; none where it has ended."""
        with self._guard, contextlib.suppress(ProcessLookupError):
            pid = self._ranks[job][rank].pid
            if self._ranks[job][rank].is_alive() and pid is not None:
                os.kill(pid, number)

    def stop(self, job: int, ranks: list[int], seconds: float) -> None:
        """SIGSTOP, and SIGCONT after some time, for processes that are still there."""
        for rank in ranks:
            self.signal(job, rank, signal.SIGSTOP)
        time.sleep(seconds)
        for rank in ranks:
            self.signal(job, rank, signal.SIGCONT)

    def await_true(self, what: str, holds: Callable[[], bool], limit_s: float = 60.0) -> float:
        """Return the seconds until ``holds()``."""
        began = time.monotonic()
        while time.monotonic() < began + limit_s:
            if holds():
                return time.monotonic() - began
            time.sleep(0.001)
        raise AssertionError(f"{what} did not happen within {limit_s:g} s: {self.told()}")

    def await_place(self, job: int, rank: int, at: At, limit_s: float = 60.0) -> None:
        """Return when the rank is there, which it comes to in each step."""
        self.await_true(f"{at.name} of job {job}", lambda: self.places.read(job, rank)[1] == at, limit_s)

    def step(self, job: int) -> int:
        """Steps that count, as its first rank knows."""
        return self.places.read(job, 0)[0]

    def await_together(self, jobs: int, *, steps: int = 5, limit_s: float = 60.0) -> float:
        """Return once so many took part in each of ``steps`` steps of all of them; the seconds that took."""
        size = self.plan.size

        def together() -> bool:
            told = [self.places.read(job, rank) for job in range(self.plan.jobs) for rank in range(size)]
            there = [each for each in told if each[2] == jobs]
            return len(there) >= jobs * size

        took = self.await_true(f"a step of {jobs} jobs", together, limit_s)
        job = next(each for each in range(self.plan.jobs) if self.places.read(each, 0)[2] == jobs)
        self.await_steps(job, steps, limit_s)
        return took

    def await_steps(self, job: int, steps: int, limit_s: float = 60.0) -> float:
        """Return when ``job`` has counted so many more; the seconds that took."""
        wanted = self.step(job) + steps
        return self.await_true(f"step {wanted} of job {job}", lambda: self.step(job) >= wanted, limit_s)

    def finish(self, limit_s: float = 60.0, steps: int = 60) -> None:
        """Let all end behind one step, ``steps`` from here, and wait for it.

        No rank may be there before all have read which it is.
        """
        self.places.last = max(self.step(job) for job in range(self.plan.jobs)) + steps
        alive = [job for job in range(self.plan.jobs) if job not in self._held]

        def ended() -> bool:
            with self._guard:
                return all(each.exitcode == 0 for job in alive for each in self._ranks[job])

        self.await_true("the end", ended, limit_s)

    def told(self) -> dict[str, Any]:
        """Where all are, and the errors that ranks left."""
        errors = {path.name: json.loads(path.read_text()) for path in sorted(self.plan.folder.glob("error-*.json"))}
        places = [self.places.read(job, rank) for job in range(self.plan.jobs) for rank in range(self.plan.size)]
        return {"places": places, "lives": self.lives, "errors": {k: v["text"] for k, v in errors.items()}}


class Told(NamedTuple):
    """A step, as one rank wrote it down."""

    number: int
    batch: int
    rank: int
    size: int
    counts: bool
    loss: str
    bits: str
    drawn: str
    life: int
    seconds: float


def told_by(plan: Plan, job: int, rank: int) -> list[Told]:
    """All that one rank wrote down; a line that a kill cut off is left out."""
    path = plan.folder / f"steps-{job}-{rank}.jsonl"
    found = []
    for line in path.read_text().split("\n") if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError, TypeError):
            found.append(Told(*json.loads(line)))
    return found


@dataclass(frozen=True)
class Found:
    """What a comparison saw."""

    steps: int
    alone: int
    """Steps in which not all jobs took part."""
    void: int
    """Attempts that did not count, of a rank."""
    largest: float
    """Difference of a loss."""
    slowest_s: float
    """A step, from the question for who is there to its end."""
    schedule: list[tuple[int, int]] = field(repr=False)
    """The first batch and the number of batches of each step."""
    bits: list[list[str]] = field(repr=False)
    """Behind each step, of each rank."""


def compare(plan: Plan) -> Found:
    """Hold all that ranks wrote down against one plain model that is trained on the batches that count.

    Raises AssertionError: two jobs have other bits behind one step; a step counts twice, or a batch; or a loss differs
    by more than 1e-12.
    """
    by_step: dict[int, list[tuple[int, Told]]] = defaultdict(list)
    void, slowest = 0, 0.0
    for job in range(plan.jobs):
        for rank in range(plan.size):
            told = told_by(plan, job, rank)
            for life in {each.life for each in told}:
                numbers = [each.number for each in told if each.life == life and each.counts]
                assert len(set(numbers)) == len(numbers), f"job {job} counted a step twice"
            for each in told:
                slowest = max(slowest, each.seconds)
                void += not each.counts
                if each.counts:
                    by_step[each.number].append((rank, each))
    assert sorted(by_step) == list(range(1, len(by_step) + 1)), "a step is missing"
    model = build()
    optimizer = optimizer_of(model)
    base, alone, largest = 0, 0, 0.0
    schedule: list[tuple[int, int]] = []
    bits: list[list[str]] = []
    for number in sorted(by_step):
        told_of = by_step[number]
        sizes = {each.size for _, each in told_of}
        assert len(sizes) == 1, f"step {number} counted with {sizes} jobs"
        (size,) = sizes
        assert {each.batch - each.rank for _, each in told_of} == {base}, f"batches of step {number}"
        behind = [{(each.bits, each.drawn) for at, each in told_of if at == rank} for rank in range(plan.size)]
        assert all(len(each) == 1 for each in behind), f"bits behind step {number}"
        bits.append([mine for ((mine, _),) in behind])
        schedule.append((base, size))
        losses: dict[tuple[int, int], torch.Tensor] = {}
        for which in range(size):
            rows = batch(base + which, plan.size)
            for rank in range(plan.size):
                losses[which, rank] = loss_of(model, rows[rank * ROWS : (rank + 1) * ROWS])
        for rank, each in told_of:
            largest = max(largest, abs(float.fromhex(each.loss) - losses[each.rank, rank].item()))
        assert largest < 1e-12, f"step {number}: {largest}"
        torch.stack(list(losses.values())).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        base += size
        alone += size < plan.jobs
    return Found(len(by_step), alone, void, largest, slowest, schedule, bits)


def require_replayed(plan: Plan, found: Found) -> None:
    """Raise AssertionError where one job that trains alone on the same batches comes to other bits."""
    told = run_processes(plan.size, replay, plan.size, found.schedule, timeout=600.0)
    for number, (mine, theirs) in enumerate(zip(found.bits, zip(*told, strict=True), strict=True)):
        assert mine == list(theirs), f"bits behind step {number + 1} of a replay"
