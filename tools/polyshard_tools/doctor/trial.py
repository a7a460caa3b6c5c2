"""The self-test: a short training run over real ranks of this host, beside an unsharded one.

A rank is this file as a program (``main``): it trains a small model for some steps, sharded over the ranks, and the
same model whole over all ranks' batches. It notes in a file how far it came, and at last how far the two are apart.
"""

from __future__ import annotations

import copy
import enum
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from polyshard.api import shard, unsharded
from polyshard.config import ShardConfig
from torch import nn

from .machine import Machine
from .report import Finding, Level, Section

#: A rank's program; its settings follow as one argument. Files in the working directory do not stand for modules.
RANK_COMMAND = (sys.executable, "-P", "-c", f"from {__name__} import main; main()")
#: Seconds for all. Ten are enough, most of them to import torch; a machine that is busy takes many times as long.
LIMIT_S = 120.0
#: Seconds that the other ranks get to report their own failure once one has failed.
_GRACE_S = 3.0
#: Seconds for a rank to write its stack.
_STACK_S = 0.3
_TAIL_LINES = 16
STEPS = 3
#: Upon which a rank writes its stack to its output.
_STACK_SIGNAL = signal.SIGUSR1
#: Of a rank's inputs; as many on each, since the mean over ranks is compared with the mean over all rows.
_BATCH, _WIDTH = 4, 16


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The argument of a rank's program."""

    rank: int
    world_size: int
    backend: str
    device: str
    """``cpu``, or ``cuda``: rank n takes device n."""
    folder: str
    """The ranks' store, and the file in which each writes how far it came."""
    limit_s: float

    @property
    def notes(self) -> Path:
        """The file in which this rank notes how far it came."""
        return Path(self.folder, f"rank{self.rank}.json")

    @property
    def output(self) -> Path:
        """The file that has its stdout and stderr."""
        return Path(self.folder, f"rank{self.rank}.txt")


@dataclass(frozen=True, slots=True)
class Trial:
    backend: str
    device: str
    world_size: int
    tolerance: float
    """Largest difference of a parameter from the unsharded model's: rounding, in the dtype of the trial."""

    @property
    def title(self) -> str:
        return f"{self.world_size} ranks over {self.backend}"


class TrialState(enum.Enum):
    EQUAL = "equal"
    """All ranks ended, with the parameters of the unsharded model."""
    DIFFERENT = "different"
    """All ranks ended, with other parameters."""
    FAILED = "failed"
    """A rank raised, or died."""
    HUNG = "hung"
    """Ranks were still running at the time limit, and were ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    trial: Trial
    state: TrialState
    seconds: float
    stages: tuple[str, ...]
    """The last stage that each rank noted."""
    difference: float | None = None
    """The largest of any rank's; None where a rank did not compare."""
    output: str = ""
    """The last lines of the first rank that failed, or hung."""


def trials_for(machine: Machine) -> tuple[Trial, ...]:
    """Two ranks over gloo, and one for each CUDA device over NCCL where there are at least two."""
    found = []
    if "gloo" in machine.backends:
        found.append(Trial("gloo", "cpu", 2, 1e-12))
    if "nccl" in machine.backends and len(machine.devices) > 1:
        found.append(Trial("nccl", "cuda", len(machine.devices), 1e-4))
    return tuple(found)


def run_trial(
    trial: Trial, environ: Mapping[str, str], limit_s: float = LIMIT_S, command: Sequence[str] = RANK_COMMAND
) -> Outcome:
    """Start the ranks with ``environ``, wait, and end those that still run after ``limit_s`` seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            RankSettings(rank, trial.world_size, trial.backend, trial.device, folder, limit_s)
            for rank in range(trial.world_size)
        ]
        codes = _codes(settings, environ, began + limit_s, command)
        notes = [_notes(each) for each in settings]
        differences = [difference for _, difference in notes if difference is not None]
        whole = len(differences) == len(notes)
        if None in codes and not any(codes):
            state = TrialState.HUNG
        elif any(code != 0 for code in codes):
            state = TrialState.FAILED
        else:
            state = TrialState.EQUAL if whole and max(differences) <= trial.tolerance else TrialState.DIFFERENT
        return Outcome(
            trial=trial,
            state=state,
            seconds=round(time.monotonic() - began, 1),
            stages=tuple(stage for stage, _ in notes),
            difference=max(differences) if whole else None,
            output=_output(settings, codes, [stage for stage, _ in notes]),
        )


def _codes(
    settings: Sequence[RankSettings], environ: Mapping[str, str], deadline: float, command: Sequence[str]
) -> list[int | None]:
    """The exit code of each rank; None for one that was ended here."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for each in settings:
            with each.output.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [*command, json.dumps(asdict(each))],
                        env=dict(environ),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        failed = False
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if not failed and any(process.poll() for process in processes):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(0.02)
        return [process.poll() for process in processes]
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(_STACK_SIGNAL)
    if running:
        time.sleep(_STACK_S)
    for process in running:
        process.kill()
        process.wait()


def _output(settings: Sequence[RankSettings], codes: Sequence[int | None], stages: Sequence[str]) -> str:
    """The last lines of the first rank that failed; of those that hang, of the one that came least far."""
    failed = [each for each, code in zip(settings, codes, strict=True) if code]
    hung = [each for each, code in zip(settings, codes, strict=True) if code is None]
    if failed:
        return _tail(failed[0].output)
    return _tail(min(hung, key=lambda each: _order(stages[each.rank])).output) if hung else ""


def _order(stage: str) -> int:
    return list(_LOOK_AT).index(stage) if stage in _LOOK_AT else len(_LOOK_AT)


def _tail(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return "\n".join(lines[-_TAIL_LINES:])


def _notes(settings: RankSettings) -> tuple[str, float | None]:
    try:
        noted = json.loads(settings.notes.read_text(encoding="utf-8"))
    except OSError:
        return "starting", None
    return noted["stage"], noted["difference"]


#: Where to look, by the stage of a rank when the trial ended; stages in their order.
_LOOK_AT: Mapping[str, str] = {
    "starting": "at torch itself: does 'python -c \"import torch\"' end, and how long does it take?",
    "joining": "at how ranks find each other: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, firewalls, /etc/hosts",
    "sharding": "at the first messages between ranks: interfaces, firewalls; for NCCL, NCCL_DEBUG=INFO shows them",
    "training": "at gathers and reductions: for NCCL, NCCL_DEBUG=INFO, peer access (IOMMU, ACS) and /dev/shm",
    "comparing": "at the last gather: for NCCL, NCCL_DEBUG=INFO, peer access (IOMMU, ACS) and /dev/shm",
    "leaving": "at the end of communicators: other versions of torch or NCCL",
}


def trial_section(outcomes: Sequence[Outcome]) -> Section:
    facts = tuple((each.trial.title, f"{each.state.value} after {each.seconds:.1f} s") for each in outcomes)
    return Section("self-test", facts, tuple(_finding(each) for each in outcomes))


def _finding(outcome: Outcome) -> Finding:
    about = outcome.trial.title
    if outcome.state is TrialState.EQUAL:
        return Finding(Level.FINE, about, f"train as an unsharded model does, within {outcome.difference:.1e}")
    if outcome.state is TrialState.DIFFERENT:
        what = f"came to other parameters than an unsharded model: apart by {outcome.difference}"
        why = f"rounding alone would be below {outcome.trial.tolerance:.0e}"
        return Finding(Level.PROBLEM, about, what, why, "report this, with the output of 'polyshard doctor --json'")
    doing = ", ".join(f"rank {rank}: {stage}" for rank, stage in enumerate(outcome.stages))
    earliest = min(outcome.stages, key=_order)
    ended = "failed" if outcome.state is TrialState.FAILED else f"did not end within {outcome.seconds:.0f} s"
    cure = f"look {_LOOK_AT.get(earliest, 'at what it wrote')}"
    why = f"it wrote:{os.linesep}{outcome.output}" if outcome.output else "it wrote nothing"
    return Finding(Level.PROBLEM, about, f"{ended} ({doing})", why, cure)


def run(settings: RankSettings) -> None:
    # A rank that hangs is asked where, before it is ended.
    faulthandler.register(_STACK_SIGNAL, all_threads=False)
    _note(settings, stage="joining")
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", settings.rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        settings.backend,
        init_method=f"file://{Path(settings.folder, 'store')}",
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.limit_s),
        device_id=device if device.type == "cuda" else None,
    )
    _note(settings, stage="sharding")
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(_WIDTH, 32), nn.Tanh(), nn.Linear(32, 4)).to(device, dtype)
    model = copy.deepcopy(whole)
    config = ShardConfig(policy={"name": "module_class", "classes": [nn.Linear]}, timeout_s=settings.limit_s)
    shard(model, config)
    _note(settings, stage="training")
    _train(model, whole, settings, dtype, device)
    _note(settings, stage="comparing")
    with unsharded(model):
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        difference = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    _note(settings, stage="leaving", difference=difference)
    dist.destroy_process_group()
    _note(settings, stage="done", difference=difference)


def _train(
    model: nn.Module, whole: nn.Module, settings: RankSettings, dtype: torch.dtype, device: torch.device
) -> None:
    sharded_steps = torch.optim.Adam(model.parameters(), lr=1e-2)
    whole_steps = torch.optim.Adam(whole.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        shape = (settings.world_size, _BATCH, _WIDTH)
        batches = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        model(batches[settings.rank]).square().mean().backward()
        whole(batches.flatten(0, 1)).square().mean().backward()
        for optimizer in (sharded_steps, whole_steps):
            optimizer.step()
            optimizer.zero_grad()


def _note(settings: RankSettings, stage: str, difference: float | None = None) -> None:
    text = json.dumps({"stage": stage, "difference": difference})
    partial = settings.notes.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(settings.notes)


def main() -> None:
    """The program of a rank: its one argument is its ``RankSettings``, as JSON."""
    run(RankSettings(**json.loads(sys.argv[1])))
