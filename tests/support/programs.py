"""Scripts as main programs, forked where torch is imported: a process of its own takes seconds for that.

Their ranks find what ``torchrun`` says in the environment, and a store that is there already; torchrun itself takes no
part.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from processes import forking_context


class Finished(NamedTuple):
    """How the ranks of a script ended."""

    codes: list[int]
    """Exit code of each."""
    output: str
    """What all wrote to standard output."""
    errors: str
    """What all wrote to standard error."""


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
    process: BaseProcess = forking_context().Process(target=_main, args=body, daemon=True)
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
