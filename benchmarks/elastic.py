"""Host time of a step of two jobs over torchft, without faults, beside plain hybrid: four CPU ranks each time.

    pip install 'polyshard[torchft]'
    python benchmarks/elastic.py

Milliseconds a step of each rank, medians: on the clock, and of its process on the CPU, which other programs on the
machine do not add to.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import torch
import torch.distributed as dist
from torch import nn

STEPS = 300
WARM = 50
_POLICY = {"name": "module_class", "classes": [nn.Linear]}


def net() -> nn.Module:
    """Five small units: their communication takes most of a step."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))


def measured(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of ``step`` on the clock and on the CPU, medians."""
    spent = []
    for _ in range(STEPS):
        began = time.perf_counter(), time.process_time()
        step()
        spent.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    clock, cpu = (1e3 * statistics.median(column) for column in zip(*spent[WARM:], strict=True))
    return clock, cpu


def run(rank: int, ranks: int, store: Path, lighthouse: str | None, results: Any) -> None:
    """One rank, of four, or of one of two jobs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if lighthouse is None:
        config = polyshard.ShardConfig(policy=_POLICY, strategy="hybrid_shard", shard_size=2)
    else:
        choice = {"name": "torchft", "lighthouse": lighthouse, "min_replicas": 2}
        config = polyshard.ShardConfig(policy=_POLICY, collectives=choice)
    model = polyshard.shard(net(), config)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.randn(8, 64)

    def plain() -> None:
        model(rows).square().mean().backward()
        polyshard.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if lighthouse is None:
        results.put(measured(plain))
        return
    from polyshard_torchft import Elastic

    elastic = Elastic(model, optimizer)

    def together() -> None:
        with elastic.step() as step:
            model(rows).square().mean().backward()
            polyshard.clip_grad_norm_(model, 1.0)
            if step.commits():
                optimizer.step()

    results.put(measured(together))
    # Not before the other job has made its last step.
    time.sleep(2.0)
    os._exit(0)


def measure(lighthouse: str | None) -> str:
    """All ranks' figures, in words."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    jobs = 1 if lighthouse is None else 2
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run, args=(rank, 4 // jobs, Path(folder, f"store-{job}"), lighthouse, results))
            for job in range(jobs)
            for rank in range(4 // jobs)
        ]
        for each in processes:
            each.start()
        told = [results.get(timeout=120.0) for _ in processes]
        for each in processes:
            each.join()
    columns = [sorted(column) for column in zip(*told, strict=True)]
    clock, cpu = columns
    return f"clock {clock[0]:.1f} to {clock[-1]:.1f} ms, CPU {cpu[0]:.1f} to {cpu[-1]:.1f} ms"


def main() -> int:
    """Measure in turns; returns the process's exit code."""
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed", file=sys.stderr)
        return 0
    os.environ.setdefault("RUST_LOG", "warn")
    from torchft.coordination import LighthouseServer

    for _ in range(2):
        print("plain hybrid:  ", measure(None), flush=True)
        server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=20)
        try:
            print("over torchft:  ", measure(server.address()), flush=True)
        finally:
            server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
