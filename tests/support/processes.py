"""Ranks that are real processes, for tests: started together, timed, and always stopped."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from seeding import seed_all

T = TypeVar("T")

#: Seconds that other ranks get to report their own error, or their stacks, once one has failed.
_GRACE = 2.0
#: Seconds for a process to import torch and join the group.
_STARTUP = 90.0
#: What a fork server imports once, and each rank would take seconds for. A rank forked from it finds them there.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "polyshard_backends.gloo",
    "polyshard_fsdp",
    "polyshard_fsdp2",
    "hypothesis",
    "pytest",
    "transformers.trainer",
    "lightning",
)


class RankError(RuntimeError):
    """A rank died, or raised something that cannot be sent to another process."""


class _Answer(NamedTuple):
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def _home(fn: Callable[..., Any]) -> tuple[str, str]:
    """Name and file of the module in which ``fn`` is defined."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules[fn.__module__]
    return module.__name__, str(module.__file__)


def _load(name: str, file: str) -> None:
    """Make module ``name`` known here: pytest gives test modules names that no path leads to."""
    if name in sys.modules:
        return
    try:
        known = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        known = None
    if known is None:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        # What is imported stays, and a full collection of garbage would walk through all of torch.
        gc.freeze()


def _sendable(error: BaseException) -> BaseException:
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}")
    return copied if isinstance(copied, BaseException) else RankError(repr(error))


def forking_context() -> Any:
    """Starts processes as forks of a server that has imported torch, and never used CUDA."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def _context(backend: str) -> Any:
    """How ranks are started: forked, or on GPUs anew."""
    # CUDA can't be used in a process forked from one that has used it, and a preloaded module may.
    return torch.multiprocessing.get_context("spawn") if "nccl" in backend else forking_context()


def _serve(
    rank: int, world_size: int, backend: str, folder: str, environ: dict[str, str], connection: Connection
) -> None:
    """Body of one process: join the group, then run what arrives until there is nothing more."""
    # A fork server has the variables of its own start.
    os.environ.clear()
    os.environ.update(environ)
    with Path(folder, f"stacks{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        options: dict[str, Any] = {}
        if "nccl" in backend:
            torch.cuda.set_device(rank)
            options["device_id"] = torch.device("cuda", rank)
        store = dist.FileStore(str(Path(folder, "store")), world_size)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_STARTUP), **options
        )
        warnings.simplefilter("error")
        gc.freeze()
        _answer_calls(rank, connection)
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def _answer_calls(rank: int, connection: Connection) -> None:
    while True:
        try:
            home, call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            _load(*home)
            target, args = pickle.loads(call)
            # What ran here before may have seeded each rank differently.
            seed_all(0)
            answer = _Answer(result=target(rank, *args))
        except BaseException as error:
            answer = _Answer(error=_sendable(error), trace=traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


class RankPool:
    """Processes that form one group of ``torch.distributed``, and run one function after another.

    After a failure the pool is closed: a rank may hang in the middle of something.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        context = _context(backend)
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self.closed = False
        with _one_thread_each():
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                arguments = (rank, world_size, backend, self._folder.name, dict(os.environ), theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        self.run(_nothing, timeout=_STARTUP)

    def run(self, target: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Call ``target(rank, *args)`` on every rank; return the results in rank order.

        Raises what the first failing rank raised, with a note that names it, or ``TimeoutError`` with the Python stacks
        of all ranks once ``timeout`` seconds have passed.
        """
        call = pickle.dumps((_home(target), pickle.dumps((target, args))))
        for connection in self._connections:
            connection.send_bytes(call)
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        failed_first: int | None = None
        while len(answers) < self.world_size and time.monotonic() < deadline:
            pending = {self._connections[rank]: rank for rank in range(self.world_size) if rank not in answers}
            for ready in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = pending[ready]
                answers[rank] = self._receive(rank, ready)
                if answers[rank].error is not None and failed_first is None:
                    failed_first = rank
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if failed_first is not None:
            self.kill()
            first = answers[failed_first]
            assert first.error is not None
            others = [f"rank {r}: {a.error!r}" for r, a in answers.items() if a.error is not None and r != failed_first]
            first.error.add_note(f"raised on rank {failed_first} of {self.world_size}; {others}\n{first.trace}")
            raise first.error
        if len(answers) < self.world_size:
            stacks = self._stacks()
            self.kill()
            silent = [rank for rank in range(self.world_size) if rank not in answers]
            raise TimeoutError(f"ranks {silent} of {self.world_size} did not answer within {timeout:g} s\n{stacks}")
        return [answers[rank].result for rank in range(self.world_size)]

    def _receive(self, rank: int, connection: Connection) -> _Answer:
        try:
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE)
            code = self._processes[rank].exitcode
            return _Answer(error=RankError(f"rank {rank} died with exit code {code}"))
        assert isinstance(answer, _Answer)
        return answer

    def _stacks(self) -> str:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(_GRACE / 4)
        files = (Path(self._folder.name, f"stacks{rank}") for rank in range(self.world_size))
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
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        self._end()

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()
            process.close()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class KeptRanks:
    """Pools that the tests of a module share, by number of ranks; to be closed behind them.

    A pool is made at first use, and anew where a failure has closed it.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, target: Callable[..., T], *args: Any, timeout: float = 90.0) -> list[T]:
        """``RankPool.run`` of ``world_size`` ranks."""
        pool = self._pools.get(world_size)
        if pool is None or pool.closed:
            pool = self._pools[world_size] = RankPool(world_size, self._backend)
        return pool.run(target, *args, timeout=timeout)

    def close(self) -> None:
        """Let every process leave."""
        while self._pools:
            self._pools.popitem()[1].close()


def _nothing(rank: int) -> None:
    """What a new pool runs first, to learn that every rank has joined."""


@contextmanager
def _one_thread_each() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def run_processes(
    world_size: int, target: Callable[..., T], *args: Any, timeout: float = 60.0, backend: str = "gloo"
) -> list[T]:
    """Call ``target(rank, *args)`` once in ``world_size`` new processes of one group; return the results in rank order.

    ``target`` is a function of a module; ``torch.distributed`` is initialised when it is called. Raises as
    ``RankPool.run``.
    """
    with RankPool(world_size, backend) as pool:
        return pool.run(target, *args, timeout=timeout)
