"""Losses of a small model that two threads train on the CPU, by configuration, and how far apart they are."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import polyshard
import torch
from measure import output_of, write
from polyshard_backends.threaded import ThreadedWorld
from workloads import Batches, Workload, whole_model

#: Trained on the CPU: 0.9M parameters.
CURVE = Workload("curve", 128, 4, 4, 4, 352, 512, 4, 64, False, 0)
#: Steps that the end of a curve is the mean of.
TAIL = 50

#: Given the collectives of a rank, its configuration.
Configure = Callable[[Mapping[str, Any]], polyshard.ShardConfig]


def alone_environment(script: str, commit: str | None) -> dict[str, Any]:
    """Command, versions and commit of a run of ``script`` in one process on the CPU."""
    return {
        "command": f"python benchmarks/{script} " + " ".join(sys.argv[1:]),
        "commit": commit or output_of("git", "rev-parse", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": "CPU",
    }


def tell_alone(report: Mapping[str, Any], out: Path | None) -> None:
    """Write ``report`` into ``out``, if any, and print all of it but the losses."""
    write(report, out)
    shown = {key: value for key, value in report["curves"].items() if key != "losses_over_10_steps"}
    print(json.dumps({**report, "curves": shown}, indent=1))


def curves(peers: Mapping[str, Configure], plain: str, steps: int, draws: int) -> dict[str, Any]:
    """Mean loss of two threads by step, for each draw of batches and peer, and how far curves are from ``plain``."""
    losses: dict[str, list[list[float]]] = {name: [] for name in peers}
    for draw in range(draws):
        for name, kept in losses.items():
            run = partial(_train, peers[name], steps, draw * steps)
            runs = ThreadedWorld(2, timeout=120.0).run(run, timeout=3600.0)
            kept.append([sum(pair) / 2 for pair in zip(*runs, strict=True)])
            print(f"{name}, draw {draw}: {sum(kept[-1][-TAIL:]) / TAIL:.4f}", file=sys.stderr, flush=True)
    found = {name: torch.tensor(kept, dtype=torch.float64) for name, kept in losses.items()}
    by_chance = (found[plain] - found[plain].roll(1, 0)).abs().mean(1)
    return {
        "model": CURVE.describe(),
        "steps": steps,
        "ends": {name: _rounded(curve[:, -TAIL:].mean(1)) for name, curve in found.items()},
        f"difference_to_{plain}_at_the_end": {
            name: _rounded((curve - found[plain])[:, -TAIL:].mean(1)) for name, curve in found.items()
        },
        f"difference_to_{plain}_over_all": {
            name: _rounded((curve - found[plain]).mean(1)) for name, curve in found.items()
        },
        f"distance_to_{plain}_over_all": {
            name: _rounded((curve - found[plain]).abs().mean(1)) for name, curve in found.items()
        },
        f"distance_of_{plain}_to_{plain}_on_other_batches": _rounded(by_chance),
        "losses_over_10_steps": {
            name: [_rounded(torch.stack([part.mean() for part in curve.split(10)])) for curve in whole]
            for name, whole in found.items()
        },
    }


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _train(configure: Configure, steps: int, first: int, rank: int, world: ThreadedWorld) -> list[float]:
    with world.lock:
        model = whole_model(CURVE, torch.device("cpu"))
    polyshard.shard(model, configure({"name": "threaded", "world": world, "rank": rank}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    batches = Batches(CURVE, rank, torch.device("cpu"))
    losses = []
    for step in range(steps):
        loss = model(*batches.batch(first + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
