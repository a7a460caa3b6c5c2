"""The kernels of a step by what they compute: where a device's time goes, from a trace of torch's profiler."""

from __future__ import annotations

import enum
import gzip
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyshard.errors import ConfigError

from .trace_step import Interval, length, union, without


class KernelKind(enum.StrEnum):
    """What a kernel computes, in the order in which kinds get a time at which several run."""

    GEMM = "GEMM"
    ATTENTION = "attention"
    LOSS = "loss"
    NORM = "norm"
    OPTIMIZER = "optimizer"
    POINTWISE = "pointwise"
    COPY = "copy"
    COMMUNICATION = "communication"
    IDLE = "idle"
    """No kernel runs."""


class Kernel(NamedTuple):
    """One kernel, copy or fill on a device."""

    name: str
    start_us: float
    end_us: float

    @property
    def interval(self) -> Interval:
        return self.start_us, self.end_us


# The first that is found decides. Of a fused kernel the name lists operations, casts among them.
_PATTERNS: tuple[tuple[KernelKind, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (KernelKind.COMMUNICATION, r"nccl|symmetric_memory|memcpy ptop"),
        (KernelKind.ATTENTION, r"flash|fmha|attention|sdpa"),
        (KernelKind.GEMM, r"gemm|nvjet|cutlass|cublas|xmma|splitk|triton_tem"),
        (KernelKind.OPTIMIZER, r"adam|sgd|adagrad|momentum|newton"),
        (KernelKind.LOSS, r"softmax|nll_loss|cross_entropy|logsumexp"),
        (KernelKind.NORM, r"layer_?norm|rms_?norm|group_?norm|gammabeta|rsqrt"),
        (KernelKind.POINTWISE, r"^triton_"),
        (KernelKind.COPY, r"memcpy|memset|copy|chunk_cat|catarray|fillfunctor"),
    )
)

_ADVICE = {
    KernelKind.IDLE: "The device waits for the host: capture the step (polyshard.CapturedStep), or enlarge the batch.",
    KernelKind.COPY: "Copies: give the optimizer polyshard.flat_parameters, and look for .contiguous() and casts.",
    KernelKind.LOSS: "The loss: torch.compile it, or take a fused cross entropy.",
    KernelKind.NORM: "Norms: torch.compile each block.",
    KernelKind.POINTWISE: "Pointwise operations: torch.compile each block.",
    KernelKind.OPTIMIZER: "The optimizer: polyshard.flat_parameters, and fused=True.",
    KernelKind.COMMUNICATION: "Exposed communication: the listener trace says of which units. Try 'symmetric'.",
    KernelKind.ATTENTION: "Attention: see which kernel serves it (torch.nn.attention.sdpa_kernel).",
}


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The time of a device from the first kernel to the end of the last, divided among kinds."""

    ms: dict[KernelKind, float]
    """Milliseconds of each kind, which add up to the whole. Where several kinds run, the first counts."""
    launches: dict[KernelKind, int]
    """Kernels of each kind."""
    longest: dict[KernelKind, str]
    """Name of the kernel of each kind that took most time in all."""

    @property
    def whole_ms(self) -> float:
        """Milliseconds from the first kernel to the end of the last."""
        return sum(self.ms.values())

    @property
    def first(self) -> KernelKind:
        """What to change first: the kind that takes most time besides products."""
        return max((kind for kind in KernelKind if kind is not KernelKind.GEMM), key=lambda kind: self.ms[kind])

    def lines(self) -> list[str]:
        """The table as text, and what to change first."""
        whole = self.whole_ms or 1.0
        lines = [f"{'':15}{'ms':>10}{'share':>8}{'kernels':>9}  longest"]
        for kind in sorted(KernelKind, key=lambda kind: -self.ms[kind]):
            name = self.longest.get(kind, "")[:60]
            share = f"{self.ms[kind] / whole:8.1%}"
            lines.append(f"{kind.value:15}{self.ms[kind]:10.2f}{share}{self.launches.get(kind, 0):9}  {name}".rstrip())
        lines.append(f"{'whole':15}{self.whole_ms:10.2f}")
        lines.append(f"First: {_ADVICE[self.first]}")
        return lines


def kind_of(name: str) -> KernelKind:
    """What the kernel called ``name`` computes; pointwise where its name does not tell."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), KernelKind.POINTWISE)


def kernel_table(kernels: Sequence[Kernel]) -> KernelTable:
    """The time of ``kernels`` by kind.

    Raises:
        ConfigError: there is none.
    """
    if not kernels:
        raise ConfigError("kernels: the trace has none. Profile a step on a GPU, with ProfilerActivity.CUDA.")
    of_kind: dict[KernelKind, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        of_kind[kind_of(kernel.name)].append(kernel)
    ms = dict.fromkeys(KernelKind, 0.0)
    taken: list[Interval] = []
    for kind in KernelKind:
        own = union(kernel.interval for kernel in of_kind[kind])
        ms[kind] = length(without(own, taken)) / 1000
        taken = union([*taken, *own])
    whole = max(kernel.end_us for kernel in kernels) - min(kernel.start_us for kernel in kernels)
    ms[KernelKind.IDLE] = whole / 1000 - length(taken) / 1000
    launches = {kind: len(those) for kind, those in of_kind.items() if those}
    return KernelTable(ms, launches, {kind: _longest(of_kind[kind]) for kind in launches})


def _longest(kernels: Iterable[Kernel]) -> str:
    times: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        times[kernel.name] += kernel.end_us - kernel.start_us
    return max(times, key=lambda name: times[name])


def read_kernels(path: str | os.PathLike[str]) -> list[Kernel]:
    """The kernels in a file of ``torch.profiler``'s ``export_chrome_trace``, in the order of time.

    Raises:
        ConfigError: it is no such file.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
        found: Any = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
        events = found["traceEvents"]
        kernels = [
            Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event.get("ph") == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file}: no trace of torch.profiler ({error!r}). Write one with profile.export_chrome_trace()."
        ) from None
    return sorted(kernels, key=lambda kernel: kernel.start_us)
