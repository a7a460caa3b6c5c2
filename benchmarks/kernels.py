"""One step under torch's profiler: what its kernels compute."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from contenders import Step
from polyshard_plugins.trace_kernels import kernel_table, read_kernels


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
