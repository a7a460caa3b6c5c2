"""Processes of one run, started in a moment from a server that has imported everything, and their ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from program import At, Job, Places, run_rank


@dataclass(frozen=True)
class End:
    """How a run ended."""

    codes: Sequence[int | None]
    """Of each rank's process; negative for a signal, None where it had to be ended by the driver."""
    seconds: float
    """From the moment of asking until the last one was gone."""


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "program",
            "polyshard.setup.shard",
            "polyshard_backends.gloo",
            "polyshard_plugins.offload",
            "polyshard_plugins.precision",
            "polyshard_policies.module_class",
            "torch._dynamo",
        ]
    )
    return context


#: Of what a rank does in one step.
_ORDER = {
    at: number
    for number, at in enumerate(
        (At.START, At.BETWEEN, At.FORWARD, At.BACKWARD, At.OPTIMIZER, At.SAVE, At.SAVE_BEHIND, At.END)
    )
}


class Fleet:
    """The ranks of one run. A context manager, which leaves no process behind."""

    def __init__(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "places").unlink(missing_ok=True)
        for path in job.folder.glob("error-*.json"):
            path.unlink()
        self.job = job
        self._places = Places(job.folder / "places", job.ranks)
        store = job.folder / f"store-{uuid.uuid4().hex}"
        context = _context()
        self.processes: list[BaseProcess] = [
            context.Process(target=run_rank, args=(rank, job, store)) for rank in range(job.ranks)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def await_place(self, rank: int, step: int, at: At, limit_s: float = 60.0) -> None:
        """Return once ``rank`` stands there, or has gone past; looks some thousand times a second."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            now, doing, _ = self._places.read(rank)
            if (now, _ORDER[doing]) >= (step, _ORDER[at]):
                return
            assert self.processes[rank].is_alive(), f"rank {rank} ended before: {self.told()}"
            time.sleep(0.0002)
        raise AssertionError(f"rank {rank} did not come to {at.name} of step {step}: {self.told()}")

    def place(self, rank: int) -> At:
        """What ``rank`` is doing."""
        return self._places.read(rank)[1]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, rank: int) -> None:
        """End one rank, as a machine does that loses power."""
        self.signal(rank, signal.SIGKILL)

    def saved(self, rank: int = 0) -> int:
        """The step of the last checkpoint that ``rank`` knew to be committed; -1 for none."""
        return self._places.read(rank)[2]

    def wait(self, limit_s: float, *, without: Sequence[int] = ()) -> End:
        """Wait for all ranks but those ``without``."""
        began = time.monotonic()
        deadline = began + limit_s
        awaited = [rank for rank in range(self.job.ranks) if rank not in without]
        for rank in awaited:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return End([process.exitcode for process in self.processes], time.monotonic() - began)

    def told(self) -> dict[int, dict[str, str]]:
        """The errors that ranks left."""
        return {
            int(path.stem.rpartition("-")[2]): json.loads(path.read_text())
            for path in sorted(self.job.folder.glob("error-*.json"))
        }

    def ends(self) -> list[Any]:
        """What each rank came to at the end of the training."""
        return [json.loads((self.job.folder / f"end-{rank}.json").read_text()) for rank in range(self.job.ranks)]


def run_to_end(job: Job, limit_s: float = 120.0) -> list[Any]:
    """Train, going on from the last checkpoint; returns what each rank came to.

    Raises:
        AssertionError: a rank failed, or it took longer.
    """
    with Fleet(job) as fleet:
        end = fleet.wait(limit_s)
        assert list(end.codes) == [0] * job.ranks, (end, fleet.told())
        return fleet.ends()
