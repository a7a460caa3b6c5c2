"""Ranks that are real processes: pools of them, scripts as main programs, and the devices of GPU tests.

Processes are forked from a server that has imported torch, which costs a process of its own seconds.

``POLYSHARD_RANKS_ON_ONE_GPU=4`` lets so many NCCL ranks share one device. NCCL takes them because each is said to be a
host of its own. Their bytes go through loopback sockets: right or wrong shows, speed does not.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing
from parity import seed_all
from polyshard_testing import Rank, RankProcesses
from polyshard_testing.ranks import answer_calls, prepared, process_rank, store_in

_TOGETHER = int(os.environ.get("POLYSHARD_RANKS_ON_ONE_GPU", "0"))

T = TypeVar("T")

#: Seconds for a process to import torch and join the group.
_STARTUP = 90.0

#: What a fork server imports once, and each rank would take seconds for. A rank forked from it finds them there.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "polyshard.checkpoint",
    "polyshard_backends.fake",
    "polyshard_backends.gloo",
    "polyshard_backends.threaded",
    "polyshard_fsdp",
    "polyshard_fsdp2",
    "hypothesis",
    "pytest",
    "transformers.trainer",
    "lightning",
    "polyshard_testing",
    "polyshard_torchft",
)


def forking_context() -> Any:
    """Starts processes as forks of a server that has imported torch, and never used CUDA."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


class _NcclProcesses(RankProcesses):
    """Ranks whose group is NCCL's alone, and bound to their device, as programs that train have it."""

    def _process(self, rank: int, device_type: str, folder: str, connection: Connection) -> Any:
        # As ``start_script`` does where CUDA is.
        context = torch.multiprocessing.get_context("spawn")
        arguments = (rank, self.world_size, folder, dict(os.environ), connection)
        return context.Process(target=_serve_nccl, args=arguments, daemon=True)


def _serve_nccl(rank: int, world_size: int, folder: str, environ: dict[str, str], connection: Connection) -> None:
    with prepared(rank, folder, environ):
        device = settle_on_device(rank)
        dist.init_process_group(
            "nccl",
            init_method=store_in(folder),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_STARTUP),
            device_id=device,
        )
        answer_calls(process_rank(rank, world_size, device), connection)
        dist.destroy_process_group()


def _alike(target: Callable[..., T], args: tuple[Any, ...], joined: Rank) -> T:
    warnings.simplefilter("error")
    # As in pyproject.toml: what torch itself imports uses TorchScript.
    warnings.filterwarnings("ignore", message="`torch.jit.script")
    # Tests that share ranks make groups of their own there, and not on all ranks as many.
    warnings.filterwarnings("ignore", message=".*share one communicator.*in different numbers of groups")
    if _TOGETHER:
        # Ranks on one device have no memory of each other's.
        warnings.filterwarnings("ignore", message=".*(registering it failed|could not map the others' memory)")
    # What ran here before may have seeded each rank differently.
    seed_all(0)
    return target(joined.rank, *args)


class RankPool:
    """``RankProcesses`` in which warnings are errors, and every call begins with the same seed on all ranks.

    After a failure the pool is closed: a rank may hang in the middle of something.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._ranks: RankProcesses
        with _one_thread_each():
            if backend == "nccl":
                # Where ranks share a device, as many as there are devices is no limit.
                self._ranks = _NcclProcesses(world_size, device_type="cpu" if share_device() else "cuda")
                return
            # Before the ranks, which want less preloaded: the server is started once.
            forking_context()
            multiprocessing.forkserver.ensure_running()
            self._ranks = RankProcesses(world_size)

    @property
    def closed(self) -> bool:
        """Whether its processes have ended."""
        return self._ranks.closed

    def run(self, target: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
        """Call ``target(rank, *args)`` on every rank; return the results in rank order.

        ``target`` is a function of a module. Raises as ``RankProcesses.run``.
        """
        return self._ranks.run(partial(_alike, target, args), timeout_s=timeout)

    def close(self) -> None:
        """Let every process leave, and stop those that do not."""
        self._ranks.close()

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


class Finished(NamedTuple):
    """How the ranks of a script ended."""

    codes: list[int]
    """Exit code of each."""
    output: str
    """What all wrote to standard output."""
    errors: str
    """What all wrote to standard error."""


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Files of ``folder`` import each other by plain names, as those of a script. None of them stays imported."""
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


def run_script(
    ranks: int,
    script: Path,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    timeout: float = 100.0,
    meanwhile: Callable[[Sequence[BaseProcess], Path], None] | None = None,
) -> Finished:
    """Run ``script`` on ``ranks`` processes, or on one that belongs to no group where that is 0.

    ``environ``: all variables but those of the group; None takes this process's. ``meanwhile``: called with the running
    processes and the file that they write to. Raises ``TimeoutError`` with what was
    written, once ``timeout`` seconds have passed; no process is left then.
    """
    variables = dict(os.environ if environ is None else environ)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    launch = {} if store is None else _launch(ranks, store.port)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "output"), Path(folder, "errors")
        processes: list[BaseProcess] = []
        try:
            for rank in range(max(ranks, 1)):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                processes.append(start_script(script, arguments, variables | launch | place, *written))
            deadline = time.monotonic() + timeout
            if meanwhile is not None:
                meanwhile(processes, written[0])
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
        output, errors = (file.read_text() for file in written)
    ended = [code for code in codes if code is not None]
    if len(ended) < len(codes):
        raise TimeoutError(f"no end within {timeout:g} s:\n{output}\n{errors}")
    return Finished(ended, output, errors)


def start_script(
    script: Path, arguments: Sequence[str], environ: Mapping[str, str], output: Path, errors: Path
) -> BaseProcess:
    """Begin ``script`` in this working directory, with the variables ``environ`` alone.

    What it writes is appended to the files ``output`` and ``errors``.
    """
    for file in (output, errors):
        file.touch()
    body = (str(script), list(arguments), dict(environ), str(Path.cwd()), str(output), str(errors))
    # CUDA can't be used in a process forked from one that has used it, and a preloaded module may.
    context = torch.multiprocessing.get_context("spawn") if torch.cuda.is_available() else forking_context()
    process: BaseProcess = context.Process(target=_main, args=body, daemon=True)
    process.start()
    return process


def _launch(ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells every rank of one host."""
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": str(uuid.uuid4()),
    }


def _main(script: str, arguments: list[str], variables: dict[str, str], folder: str, output: str, errors: str) -> None:
    # A fork server has the variables, the folder and the path of its own start.
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for file, stream in ((output, sys.stdout), (errors, sys.stderr)):
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, stream.fileno())
        os.close(opened)
    # As torchrun gives each of several ranks one thread.
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill ``process`` and its descendants, parents first; torchrun's ranks are in sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        program = psutil.Process(process.pid)
        for each in [program, *program.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def gpu_ranks(most: int = 2) -> int:
    """How many ranks a test has, at ``most`` where each has a device; at least 1."""
    return _TOGETHER or max(1, min(torch.cuda.device_count(), most))


def share_device() -> bool:
    """Whether all ranks compute on one device."""
    return bool(_TOGETHER)


def device_of(rank: int) -> torch.device:
    """Where ``rank`` computes."""
    return torch.device("cuda", 0 if _TOGETHER else rank)


def settle_on_device(rank: int) -> torch.device:
    """Make ``device_of(rank)`` this process's device; to be called before the process group is made."""
    if _TOGETHER:
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = device_of(rank)
    torch.cuda.set_device(device)
    return device
