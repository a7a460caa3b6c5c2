"""One trainer run twice, over torch's own FSDP and over polyshard, and all that it shows compared to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ENGINES = ("torch", "polyshard")

#: Seconds for a run. Ranks that are not done are ended, and say where each thread stood.
LIMIT = 300.0


class Beside:
    """Two processes that have imported a trainer, over torch's FSDP and over polyshard's, and fork ranks of it.

    ``file`` is the trainer's, a test file: what ranks run are its functions, and its ``prepare`` is what is done before
    ranks are forked. ``moved`` names the drop-ins whose ``install()`` is the line that moves it.
    """

    def __init__(self, file: str, *moved: str) -> None:
        self._file, self._moved = file, moved
        self._servers: dict[str, subprocess.Popen[str]] = {}
        self._home = tempfile.TemporaryDirectory()

    def compare(
        self, folder: Path, ranks: int, function: Callable[..., Any], launcher: Sequence[str] = (), **arguments: Any
    ) -> list[Any]:
        """Run ``function(**arguments)`` on ``ranks`` ranks over each engine, in ``folder / engine``; what ranks show.

        ``{other}`` in an argument becomes the name of the other engine. Ranks are forked, or are processes of
        ``python -m launcher``. Fails where any rank shows anything else over polyshard than over torch; returns what
        each showed.
        """
        request = {"function": function.__name__, "ranks": ranks, "arguments": arguments, "limit": LIMIT}
        answers = {}
        for engine, other in zip(ENGINES, reversed(ENGINES), strict=True):
            here = folder / engine
            here.mkdir(parents=True)
            line = json.dumps({**request, "folder": str(here)}).replace("{other}", other)
            if launcher:
                command, environment = self._command(engine)
                launched = [command[0], "-m", *launcher, *command[1:]]
                ended = subprocess.run(launched, env={**environment, "REQUEST": line}, timeout=LIMIT, check=False)
                answers[engine] = [str(ended.returncode)] * ranks
            else:
                print(line, file=self._server(engine).stdin, flush=True)
        for engine in ENGINES:
            answers[engine] = answers.get(engine) or self._answer(engine)
        for engine in ENGINES:
            assert answers[engine] == ["0"] * ranks, told(folder / engine, f"{engine}: ranks ended {answers[engine]}")
        control, moved = ([load(folder / engine, rank) for rank in range(ranks)] for engine in ENGINES)
        found = list(differences(control, moved, "rank "))
        assert not found, f"{len(found)} differences: " + "; ".join(found[:6])
        return control

    def close(self) -> None:
        """End both processes, and what ranks they wait for."""
        while self._servers:
            _, server = self._servers.popitem()
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
        self._home.cleanup()

    def _command(self, engine: str) -> tuple[list[str], dict[str, str]]:
        moved = self._moved if engine == "polyshard" else ()
        folder = {"HF_HOME": self._home.name, "TORCHINDUCTOR_CACHE_DIR": self._home.name}
        command = [sys.executable, str(Path(__file__).with_name("ranks.py")), self._file, *moved]
        return command, {**os.environ, **OFFLINE, **folder, "ENGINE": engine}

    def _server(self, engine: str) -> subprocess.Popen[str]:
        if engine not in self._servers:
            command, environment = self._command(engine)
            self._servers[engine] = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        return self._servers[engine]

    def _answer(self, engine: str) -> list[str]:
        stdout = self._server(engine).stdout
        assert stdout is not None
        return stdout.readline().split()


#: No hub is asked, no device is looked for, and ranks take a core each.
OFFLINE = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


def load(folder: Path, rank: int) -> Any:
    """What a rank showed."""
    return torch.load(folder / f"shown.{rank}", weights_only=True)


def told(folder: Path, failure: str) -> str:
    """``failure``, and the end of what each rank wrote."""
    logs = sorted(folder.glob("log.*"))
    return "\n".join([failure, *(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)])


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Each value that is not the same in both, with its place."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            yield f"{where}: {tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}"
        elif not torch.equal(a, b):
            yield f"{where}: {(a.double() - b.double()).abs().max().item():.2e} of {a.double().abs().max().item():.2e}"
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            if key in a and key in b:
                yield from differences(a[key], b[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}: only over {ENGINES[key in b]}"
    elif isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str) and len(a) == len(b):
        for place, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from differences(left, right, f"{where}[{place}]")
    elif a != b:
        yield f"{where}: {a!r}, {b!r}"
