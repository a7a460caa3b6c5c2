"""What a benchmark on several ranks does with whatever it measures: options, ranks, parts that fail together, one step,
and provenance.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import NotServedError
from measure import output_of, provenance
from polyshard_plugins.trace_kernels import kernel_table, read_kernels
from ranks import Ranks

#: Tokens and next tokens, ``[batch, seq]``, to the loss of a training step.
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_parser(about: str | None, epilog: str | None = None, *, pretends: bool = False) -> argparse.ArgumentParser:
    """The options that all benchmarks on ranks have."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=epilog
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--commit", help="recorded instead of what git says")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    if pretends:
        parser.add_argument(
            "--pretend",
            type=int,
            default=0,
            help="one process, without torchrun, as the first of so many ranks whose messages nobody sends: compute, "
            "host and memory of one GPU; losses mean nothing",
        )
    return parser


def not_started(given: argparse.Namespace) -> int | None:
    """The exit code where nothing can be measured, having said why; else None."""
    if "RANK" not in os.environ and not getattr(given, "pretend", 0):
        # Not an error: all benchmarks may be run one after the other, each by itself.
        print("nothing measured: start it with torchrun, see --help", file=sys.stderr)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: no CUDA device is there; --device cpu --work tiny tries the program", file=sys.stderr)
        return 2
    return None


@contextmanager
def job(given: argparse.Namespace, hang_s: float) -> Iterator[Ranks]:
    """The ranks that ``given`` asks for. What hangs longer than ``hang_s`` at the end says where, and ends."""
    # A warning that is shown costs more than what is measured here.
    warnings.simplefilter("ignore")
    if given.device == "cpu":
        torch.set_num_threads(1)
    ranks = Ranks(given.device, timedelta(seconds=2 * hang_s), getattr(given, "pretend", 0))
    yield ranks
    # A model holds memory that its communicators registered: it goes before them.
    gc.collect()
    faulthandler.dump_traceback_later(hang_s, exit=True)
    ranks.close()
    faulthandler.cancel_dump_traceback_later()


def compute_deterministically() -> None:
    """No operation whose result differs between two runs: another in its place, or an error."""
    # Read when cuBLAS is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not ``warn_only``: that leaves the backward of fused attention as it is, whose sums depend on timing.
    torch.use_deterministic_algorithms(True)
    # A guard against reading memory that nothing wrote; it writes every new tensor once more.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class FailedError(Exception):
    """Some rank failed: its reason, the same on all ranks, and this rank's own stack."""

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trace = trace


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """A part that fails on all ranks or on none: they meet at its end. Raises ``FailedError`` where one did."""
    reason = trace = ""
    try:
        yield
    except NotServedError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:1500]
        trace = traceback.format_exc()[-4000:]
    reasons = ranks.meet(reason)
    if reasons:
        raise FailedError(reasons, trace)


class Taken(NamedTuple):
    """Milliseconds of one step."""

    device: float
    """Between two events on the device; on the CPU, wall time."""
    host: float
    """Wall time until the step's last call returned."""
    processor: float
    """Time that all threads of the process were given until then."""


def timed(step: Step, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[Taken, torch.Tensor]:
    """One step, on ``[batch, seq]`` tokens and next tokens: what it took, and its loss."""
    on_cuda = tokens.is_cuda
    if on_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began, given = time.perf_counter(), time.process_time()
    if on_cuda:
        start.record()
    loss = step(tokens, targets)
    if on_cuda:
        end.record()
    host, processor = (time.perf_counter() - began) * 1e3, (time.process_time() - given) * 1e3
    if not on_cuda:
        return Taken(host, host, processor), loss
    torch.cuda.synchronize()
    return Taken(float(start.elapsed_time(end)), host, processor), loss


def kernels_of(step: Step, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, Any] | None:
    """Milliseconds and launches of each kind of kernel in one ``step``; None without a GPU."""
    if not tokens.is_cuda:
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(tokens, targets)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profile.export_chrome_trace(str(path))
        found = kernel_table(read_kernels(path))
    return {
        "ms": {kind.value: round(ms, 3) for kind, ms in found.ms.items()},
        "launches": {kind.value: number for kind, number in found.launches.items()},
        "longest": {kind.value: name[:120] for kind, name in found.longest.items()},
    }


def environment(ranks: Ranks, script: str, commit: str | None) -> dict[str, Any]:
    """Command, hardware, versions and commit of a run of ``script``, a file of this folder."""
    pretends = "RANK" not in os.environ
    launch = (
        f"{'python' if pretends else f'torchrun --standalone --nproc-per-node {ranks.world_size}'} benchmarks/{script}"
    )
    # Where files lay on that machine is of no interest to a reader.
    asked = re.sub(r"(?<![\w.])(/[^/\s,]+)*/", "", " ".join(sys.argv[1:]))
    found: dict[str, Any] = {
        "command": f"{launch} {asked}",
        **provenance(commit),
        "torch": str(torch.__version__),
        "world_size": ranks.world_size,
        "device": "CPU",
        "polyshard_variables": {name: text for name, text in os.environ.items() if name.startswith("POLYSHARD_")},
    }
    if ranks.device.type == "cuda":
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found |= {
            "device": torch.cuda.get_device_name(ranks.device),
            "devices": torch.cuda.device_count(),
            "driver": driver.splitlines()[0] if driver else "",
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in nccl),
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")),
        }
    return found
