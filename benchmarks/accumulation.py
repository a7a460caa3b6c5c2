"""Microbatches of a hybrid strategy: replicas that add up each, ``no_all_reduce``, and ``no_sync``.

    torchrun --standalone --nproc-per-node 4 benchmarks/accumulation.py --out benchmarks/results/accumulation.json

Four gloo ranks on a CPU, two shards of each of two replicas. An all-reduce between replicas takes ``--delay-ms`` more
than gloo's own, as over a slow link. The three ways take turns within a round, on models of their own; a time is the
slowest rank's. Elements sent are counted on pretended ranks (``fake``), and what waits is counted in the engine's
reports. Ratios are the result.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import polyshard
import torch
from measure import spread, undisturbed, write
from polyshard.interfaces import PluginContext, ReduceOp, Work
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.gloo import GlooCollectives
from ranks import Ranks
from runs import environment
from torch import nn

_MICROBATCHES = 4
_WIDTH, _UNITS, _BATCH = 256, 6, 16

WAYS: dict[str, Callable[[nn.Module], AbstractContextManager[None]]] = {
    "each microbatch": lambda _: nullcontext(),
    "no_all_reduce": polyshard.no_all_reduce,
    "no_sync": polyshard.no_sync,
}


class _Late(Work):
    """An operation over a link that is slow by ``delay`` seconds."""

    def __init__(self, work: Work, delay: float) -> None:
        self._work, self._arrives = work, time.perf_counter() + delay

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._arrives - time.perf_counter()))


class _SlowBetweenReplicas(GlooCollectives):
    delay = 0.0

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return _Late(super().all_reduce(tensor, op=op), self.delay)


class _Recorded(FakeCollectives):
    groups: list[FakeCollectives]

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> FakeCollectives:
        self.groups.append(super().partition(rank_lists))
        return self.groups[-1]


def _sharded(collectives: object) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_UNITS)]
    policy = {"name": "module_class", "classes": [nn.Linear]}
    config = polyshard.ShardConfig(collectives=collectives, strategy="hybrid_shard", shard_size=2, policy=policy)
    return polyshard.shard(nn.Sequential(*layers), config)


def _step(model: nn.Module, way: str) -> None:
    batch = torch.ones(_BATCH, _WIDTH)
    with WAYS[way](model):
        for _ in range(_MICROBATCHES - 1):
            model(batch).sum().backward()
    model(batch).sum().backward()
    model.zero_grad()


def _sent(way: str) -> dict[str, int]:
    """Elements that a rank of two shards and two replicas sends in a step."""
    ranks = _Recorded(PluginContext("fake", torch.device("cpu")), 0, 4)
    ranks.groups = []
    model = _sharded(ranks)
    _step(model, way)
    for group in ranks.groups:
        group.calls.clear()
    _step(model, way)
    calls = [call for group in ranks.groups for call in group.calls]
    return {
        name: sum(call.sent for call in calls if call.operation == name)
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    }


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    # Before there is a process group, in which all would have to take part.
    sent = {way: _sent(way) for way in WAYS}
    ranks = Ranks("cpu", timedelta(seconds=60))
    _SlowBetweenReplicas.delay = given.delay_ms / 1e3
    models = {way: _sharded(_SlowBetweenReplicas(PluginContext("gloo", ranks.device))) for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(given.rounds + 2):
        for way, model in models.items():
            ranks.synchronize()
            with undisturbed():
                began = time.perf_counter()
                _step(model, way)
                if turn > 1:
                    taken[way].append((time.perf_counter() - began) * 1e3)
    report: dict[str, Any] = {"environment": environment(ranks, "accumulation.py", None), "rows": {}}
    slowest = {way: ranks.largest(times) for way, times in taken.items()}
    for way, times in slowest.items():
        faster = [a / b for a, b in zip(slowest["each microbatch"], times, strict=True)]
        report["rows"][way] = {"ms": spread(times), "times_as_fast": spread(faster), "elements_sent": sent[way]}
        if ranks.rank == 0:
            medians = f"{spread(times)['median']:8.1f} ms, {spread(faster)['median']:.2f} times as fast"
            print(f"{way:16} {medians}, sends {sent[way]}")
    write(report, given.out, ranks.rank)
    for model in models.values():
        polyshard.close(model)
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
