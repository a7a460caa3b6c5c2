"""Forks the ranks of a trainer: ``python ranks.py FILE [DROP-IN ...]``, with a request in each line of standard input.

``beside.Beside`` starts it, over torch's own FSDP without a drop-in, and over polyshard with some. A launcher
starts one process a rank, whose request is ``REQUEST``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch


def main(file: str, *moved: str) -> None:
    """Answer each request with the exit codes of its ranks, or be a rank of one."""
    for name in moved:
        importlib.import_module(name).install()
    trainer = importlib.import_module(Path(file).stem)
    trainer.prepare()
    if "REQUEST" in os.environ:
        request = json.loads(os.environ["REQUEST"])
        _rank(int(os.environ["RANK"]), request, getattr(trainer, request["function"]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        print(*_run(request, getattr(trainer, request["function"])), file=answers, flush=True)
    # What a trainer left running waits for nobody, here and in ranks.
    os._exit(0)


def _run(request: dict[str, Any], function: Any) -> list[int]:
    port = _free_port()
    started = [_fork(rank, port, request, function) for rank in range(request["ranks"])]
    end = time.monotonic() + request["limit"]
    codes: dict[int, int] = {}
    while len(codes) < len(started):
        for pid in started:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        # Where one has failed the others wait for it.
        if any(codes.values()):
            end = min(end, time.monotonic() + 10)
        if time.monotonic() > end:
            for pid in set(started) - set(codes):
                os.kill(pid, signal.SIGABRT)
            end = float("inf")
        time.sleep(0.05)
    return [codes[pid] for pid in started]


def _free_port() -> int:
    # Below those that the system gives to connections, which may take it before the ranks do.
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _fork(rank: int, port: int, request: dict[str, Any], function: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    ranks = str(request["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _rank(rank, request, function)
    return None


def _rank(rank: int, request: dict[str, Any], function: Any) -> NoReturn:
    """Be a rank: what it shows is in ``shown.RANK``, what it says in ``log.RANK``."""
    code = 1
    try:
        os.chdir(request["folder"])
        log = os.open(f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        torch.save(function(**request["arguments"]), f"shown.{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
