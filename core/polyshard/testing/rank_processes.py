"""Processes that form one group of ``torch.distributed``, and run one function after another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from ..errors import CollectiveError, CollectiveTimeoutError, RankFailedError, WorldSizeError
from .rank_calls import Answer, Call, Joined, serve

__all__ = ["Joined", "KeptProcesses", "RankProcesses"]

T = TypeVar("T")

#: Seconds for a process to import torch and join the group.
_STARTUP_S = 120.0
#: Seconds that others get to report, once a rank has failed: several often fail of one cause.
_GRACE_S = 0.5
#: Seconds for processes to leave by themselves.
_LEAVE_S = 10.0


def _context() -> Any:
    """Starts processes that have nothing of this one's threads and devices."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The server imports once what each rank would take seconds for.
    context.set_forkserver_preload(["torch", "polyshard.testing"])
    return context


class RankProcesses:
    """Ranks that are processes, for tests: started together, timed, and always stopped.

    A context manager. After a failure it is ``closed``, since a rank may hang in the middle of something.

    Args:
        world_size: number of processes.
        device_type: ``"cuda"`` gives each a device of its own, and their group NCCL beside gloo.

    Raises:
        WorldSizeError: ``world_size`` is below 1, or there are fewer CUDA devices.
        CollectiveTimeoutError: they did not meet.
    """

    def __init__(self, world_size: int, *, device_type: Literal["cpu", "cuda"] = "cpu") -> None:
        if world_size < 1:
            raise WorldSizeError(f"{world_size} processes do not form a group; give at least 1")
        if device_type == "cuda" and torch.cuda.device_count() < world_size:
            raise WorldSizeError(
                f"{world_size} ranks need a CUDA device each, and there are {torch.cuda.device_count()}; give fewer"
            )
        self.world_size = world_size
        self.closed = False
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            process = self._process(rank, device_type, self._folder.name, theirs)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.run(_nothing, timeout_s=_STARTUP_S)

    def _process(self, rank: int, device_type: str, folder: str, connection: Connection) -> Any:
        """What is to be started as ``rank``, and will answer at ``connection``."""
        arguments = (rank, self.world_size, device_type, folder, dict(os.environ), _STARTUP_S, connection)
        return _context().Process(target=serve, args=arguments, daemon=True)

    def run(self, fn: Callable[[Joined], T], *, timeout_s: float = 60.0) -> list[T]:
        """Call ``fn`` on every rank; return the results in rank order.

        Raises as ``run_ranks``.
        """
        call = Call.of(fn)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(call.pickled)
            except OSError:
                self._fail({rank: self._dead(rank)}, [rank])
        answers, failed = self._collect(time.monotonic() + timeout_s)
        if failed:
            self._fail(answers, failed)
        if len(answers) < self.world_size:
            silent = [rank for rank in range(self.world_size) if rank not in answers]
            stacks = self._stacks()
            self.kill()
            raise CollectiveTimeoutError(
                f"ranks {silent} of {self.world_size} had not returned after {timeout_s:g} s; see below where every "
                f"rank stood\n{stacks}"
            )
        return [answers[rank].result for rank in range(self.world_size)]

    def _collect(self, deadline: float) -> tuple[dict[int, Answer], list[int]]:
        """Answers by rank, and those that failed in the order in which they did."""
        answers: dict[int, Answer] = {}
        failed: list[int] = []
        while len(answers) < self.world_size and time.monotonic() < deadline:
            pending = {self._connections[rank]: rank for rank in range(self.world_size) if rank not in answers}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            for rank in sorted(pending[each] for each in ready if isinstance(each, Connection)):
                answers[rank] = self._receive(rank)
                if answers[rank].error is not None:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers, failed

    def _receive(self, rank: int) -> Answer:
        try:
            return Answer.unpickled(self._connections[rank].recv_bytes(), rank)
        except (EOFError, OSError):
            return self._dead(rank)

    def _dead(self, rank: int) -> Answer:
        self._processes[rank].join(_GRACE_S)
        code = self._processes[rank].exitcode
        error = RankFailedError(
            f"rank {rank} of {self.world_size} died with exit code {code}; see above for what it wrote"
        )
        return Answer(error=error)

    def _fail(self, answers: dict[int, Answer], failed: list[int]) -> None:
        self.kill()
        # One that died first, since others lose their connection to it; then whoever did not merely miss another.
        rank = min(failed, key=lambda each: (_weight(answers[each]), failed.index(each)))
        first = answers[rank]
        assert first.error is not None
        others = [f"rank {each}: {answers[each].error!r}" for each in failed if each != rank]
        note = f"raised on rank {rank} of {self.world_size} processes"
        first.error.add_note("\n".join([note + (", beside" if others else ""), *others, first.trace]).rstrip())
        raise first.error

    def _stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_GRACE_S)
        files = [Path(self._folder.name, f"stacks{rank}") for rank in range(self.world_size)]
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in enumerate(files) if file.exists())

    def kill(self) -> None:
        """Stop every process now."""
        self.closed = True
        for process in self._processes:
            process.kill()
        self._end()

    def close(self) -> None:
        """Let every process leave, and stop those that do not."""
        if self.closed:
            return
        self.closed = True
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + _LEAVE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        self._end()

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class KeptProcesses:
    """Processes that several tests share, by number of ranks; started at first use, and anew after a failure."""

    def __init__(self, *, device_type: Literal["cpu", "cuda"] = "cpu") -> None:
        self._device_type = device_type
        self._started: dict[int, RankProcesses] = {}

    def of(self, world_size: int) -> RankProcesses:
        """``world_size`` of them; raises as ``RankProcesses``."""
        processes = self._started.get(world_size)
        if processes is None or processes.closed:
            processes = self._started[world_size] = RankProcesses(world_size, device_type=self._device_type)
        return processes

    def close(self) -> None:
        """Let every process leave."""
        while self._started:
            self._started.popitem()[1].close()


def _weight(answer: Answer) -> int:
    if isinstance(answer.error, RankFailedError):
        return 0
    return 2 if isinstance(answer.error, CollectiveError) else 1


def _nothing(joined: Joined) -> None:
    """What new processes run first, to learn that every rank has joined."""
