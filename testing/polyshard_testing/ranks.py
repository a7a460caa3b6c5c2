"""Real ranks for the tests of a plugin: threads of this process, or processes of their own, which are sent calls."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from polyshard import registry
from polyshard.config import PluginChoice
from polyshard.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    RankFailedError,
    WorldSizeError,
)
from polyshard.interfaces import Group
from typing_extensions import override

T = TypeVar("T")

#: The collectives of ``torch.distributed``, whatever else is installed.
_DISTRIBUTED = "polyshard:auto"
_THREADED = "polyshard:threaded"
#: A rank's timeout for others, in multiples of the run's: the end of the run must find it waiting, and show where.
_WAITING = 2.0


@dataclass(frozen=True)
class Rank:
    """Where a function runs that ``run_ranks`` calls."""

    rank: int
    """This rank, in ``range(world_size)``."""
    world_size: int
    """Number of ranks."""
    collectives: PluginChoice
    """Collectives between these ranks, for ``ShardConfig(collectives=...)`` and ``context.construct``."""
    device: torch.device
    """Where this rank computes."""
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """To be held around uses of process-wide state, such as ``torch.manual_seed`` and the making of a model, which
    ranks that are threads share. Between processes it does nothing."""


def run_ranks(
    world_size: int,
    fn: Callable[[Rank], T],
    *,
    backend: Literal["threads", "processes"] = "threads",
    timeout_s: float = 60.0,
    device_type: Literal["cpu", "cuda"] = "cpu",
) -> list[T]:
    """Call ``fn`` once on each of ``world_size`` ranks, all at the same time; return the results in rank order.

    ``"threads"`` take no time to start, and ``fn`` may be any function. ``"processes"`` are new ones for each call,
    which join a group of ``torch.distributed`` first: ``fn``, its arguments and its results are pickled, so ``fn`` must
    be a function of a module, or a ``functools.partial`` of one. ``RankProcesses`` runs many functions in processes
    that are started once.

    If a rank raises, all others are ended, and its exception is raised here, with a note that names the rank and holds
    its traceback. Of several exceptions, the first counts that is not about a missing rank.

    Args:
        world_size: number of ranks, at least 1.
        fn: called with the ``Rank``.
        backend: the kind of ranks.
        timeout_s: seconds until all ranks must have returned; starting processes does not count.
        device_type: ``"cuda"`` gives each process a device of its own, and its group NCCL beside gloo.

    Raises:
        ConfigError: ``fn`` cannot be pickled; a backend or device that does not exist; ``timeout_s`` is not positive.
        WorldSizeError: ``world_size`` is below 1, or there are fewer CUDA devices.
        CollectiveTimeoutError: ranks had not returned in time; the message has the stacks of all.
        RankFailedError: a process died, or its result or exception could not be pickled.
    """
    if timeout_s <= 0:
        raise ConfigError(f"ranks cannot end within {timeout_s:g} seconds; give a positive timeout_s")
    if backend == "threads":
        if device_type != "cpu":
            raise ConfigError(f'ranks that are threads compute on the CPU, not on {device_type}; take "processes"')
        return run_threads(world_size, fn, timeout_s)
    if backend != "processes":
        raise ConfigError(f'ranks are "threads" or "processes", not {backend!r}')
    with RankProcesses(world_size, device_type=device_type) as processes:
        return processes.run(fn, timeout_s=timeout_s)


@functools.cache
def _threaded() -> Any:
    # polyshard's own names stay what they are; reading what is installed takes longer than many a run.
    return registry.resolve(Group.COLLECTIVES, _THREADED).factory


def run_threads(
    world_size: int, fn: Callable[[Rank], T], timeout_s: float, collectives: str = _THREADED, factory: Any = None
) -> list[T]:
    """``run_ranks`` in threads that meet in a world which ``factory.make_world`` makes.

    ``collectives`` is the name of ``factory``; by default, both are polyshard's own.
    """
    world: Any = (factory or _threaded()).make_world(world_size, timeout_s * _WAITING)

    def on_rank(rank: int, world: Any) -> T:
        chosen = {"name": collectives, "world": world, "rank": rank}
        return fn(Rank(rank, world_size, chosen, torch.device("cpu"), world.lock))

    results: list[T] = world.run(on_rank, timeout=timeout_s)
    return results


def process_rank(rank: int, world_size: int, device: torch.device) -> Rank:
    """A rank that is this process, in the default group of ``torch.distributed``."""
    return Rank(rank, world_size, _DISTRIBUTED, device)


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
    context.set_forkserver_preload(["torch", "polyshard_testing"])
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
        """The process that will be ``rank``, and answer at ``connection``."""
        arguments = (rank, self.world_size, device_type, folder, dict(os.environ), _STARTUP_S, connection)
        return _context().Process(target=serve, args=arguments, daemon=True)

    def run(self, fn: Callable[[Rank], T], *, timeout_s: float = 60.0) -> list[T]:
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
        while self._started:
            self._started.popitem()[1].close()


def _weight(answer: Answer) -> int:
    if isinstance(answer.error, RankFailedError):
        return 0
    return 2 if isinstance(answer.error, CollectiveError) else 1


def _nothing(rank: Rank) -> None:
    """The first call of new processes, which returns once every rank has joined."""


class _NotingPickler(pickle.Pickler):
    """Notes the files of the modules whose functions and classes are pickled by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, str] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        name = getattr(obj, "__module__", None)
        module = sys.modules.get(name) if isinstance(name, str) else None
        file = getattr(module, "__file__", None)
        if module is not None and file is not None:
            self.modules[module.__name__] = file
        return NotImplemented


@dataclass(frozen=True)
class Call:
    """A function, and the files of the modules that it needs: pytest names test modules as no path does."""

    modules: Mapping[str, str]
    fn: bytes

    @property
    def pickled(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Call:
        """Raises ``ConfigError`` for what cannot be pickled."""
        file = io.BytesIO()
        pickler = _NotingPickler(file)
        try:
            pickler.dump(fn)
        # Whatever the __reduce__ of some object raises.
        except Exception as error:
            raise ConfigError(
                f"a process cannot be sent what it is to call: {type(error).__name__}: {error}. Take a function that "
                "stands in a module, or functools.partial of one with arguments that can be pickled; threads take any."
            ) from error
        return cls(pickler.modules, file.getvalue())

    def load(self) -> Callable[[Rank], Any]:
        for name, file in self.modules.items():
            _make_known(name, file)
        fn: Callable[[Rank], Any] = pickle.loads(self.fn)
        return fn


def _make_known(name: str, file: str) -> None:
    if name in sys.modules:
        return
    try:
        known = importlib.util.find_spec(name)
    # Also for a package that is there in parts, or has no spec.
    except (ImportError, ValueError, AttributeError):
        known = None
    if known is not None:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    gc.freeze()


@dataclass(frozen=True)
class Answer:
    result: Any = None
    error: BaseException | None = None
    trace: str = ""

    def pickled(self, rank: int) -> bytes:
        try:
            sent = pickle.dumps(self)
            pickle.loads(sent)
        except Exception as error:
            return pickle.dumps(self._unsendable(rank, error))
        return sent

    def _unsendable(self, rank: int, error: Exception) -> Answer:
        if self.error is not None:
            text = f"rank {rank} raised {type(self.error).__name__}: {self.error}"
        else:
            text = (
                f"what rank {rank} returned, a {type(self.result).__name__}, cannot be sent to another process: "
                f"{type(error).__name__}: {error}. Return numbers, text or tensors."
            )
        return Answer(error=RankFailedError(text), trace=self.trace)

    @classmethod
    def unpickled(cls, sent: bytes, rank: int) -> Answer:
        try:
            answer = pickle.loads(sent)
        # A class that is known there alone.
        except Exception as error:
            return cls(error=RankFailedError(f"what rank {rank} sent cannot be read: {type(error).__name__}: {error}"))
        assert isinstance(answer, cls)
        return answer


def serve(
    rank: int,
    world_size: int,
    device_type: str,
    folder: str,
    environ: dict[str, str],
    startup_s: float,
    connection: Connection,
) -> None:
    """Body of one process: join the group, then call what arrives until there is nothing more."""
    with prepared(rank, folder, environ):
        cuda = device_type == "cuda"
        if cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=store_in(folder),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=startup_s),
        )
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        answer_calls(process_rank(rank, world_size, device), connection)
        dist.destroy_process_group()


@contextmanager
def prepared(rank: int, folder: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Give this process the variables ``environ`` alone, one thread, and a file in ``folder`` for its stacks."""
    # A server that forks has the variables of its own start.
    os.environ.clear()
    os.environ.update(environ)
    with Path(folder, f"stacks{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        yield
        faulthandler.unregister(signal.SIGUSR1)


def store_in(folder: str) -> str:
    """Where the processes of ``folder`` meet, for ``init_process_group``."""
    return f"file://{Path(folder, 'store')}"


def answer_calls(rank: Rank, connection: Connection) -> None:
    """Run the calls that arrive, and send back their answers, until the other end is closed."""
    # Imported modules stay, and a full collection would walk through all of torch.
    gc.freeze()
    while True:
        try:
            sent = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            call = pickle.loads(sent)
            answer = Answer(result=call.load()(rank))
        except (SystemExit, KeyboardInterrupt) as error:
            # Raised anew in the test, it would end that, too.
            failure = RankFailedError(f"rank {rank.rank} raised {type(error).__name__}: {error}")
            answer = Answer(error=failure, trace=traceback.format_exc())
        # pytest's own exceptions, too: any exception that ends the function is its answer.
        except BaseException as error:
            answer = Answer(error=error, trace=traceback.format_exc())
        connection.send_bytes(answer.pickled(rank.rank))
