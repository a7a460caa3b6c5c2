"""Gradients in int8 and fp8 beside gradients as they are: what they send, and what training makes of it.

    python benchmarks/compressed.py --out benchmarks/results/compressed.json

On the CPU, without other processes: bytes that a rank sends for a reduction, and losses of a small model that two
threads train from the same start on the same batches, on several draws of batches, for what chance alone does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polyshard
import torch
from curves import Configure, alone_environment, curves, tell_alone
from polyshard_plugins.block_codec import BlockCode, Number
from workloads import Block

_BLOCKS = (64, 256, 1024)
_RANKS = (2, 8, 64)


def sent() -> list[dict[str, Any]]:
    """Bytes that leave a rank for each element of a unit that is reduced: over shards, and over as many replicas."""
    numel = 1 << 26
    rows = []
    for ranks in _RANKS:
        others = (ranks - 1) / ranks
        rows.append({"ranks": ranks, "gradients": "bf16", "shards": 2 * others, "replicas": 4 * others})
        for block in _BLOCKS:
            nbytes = BlockCode(Number.INT8, block).nbytes(numel // ranks) / (numel // ranks)
            row = {"ranks": ranks, "gradients": "int8 or fp8", "block": block}
            rows.append({**row, "shards": round(nbytes * others, 4), "replicas": round(2 * nbytes * others, 4)})
    return rows


def plain(collectives: Mapping[str, Any]) -> polyshard.ShardConfig:
    """Compute in bf16, gradients as the built-in backends send them."""
    policy = {"name": "module_class", "classes": [Block]}
    return polyshard.ShardConfig(collectives=dict(collectives), precision="bf16", policy=policy)


def compressed(number: str) -> Configure:
    """The same, with gradients in eight bits: of all units, since those of this model are small."""

    def configure(collectives: Mapping[str, Any]) -> polyshard.ShardConfig:
        return plain({"name": "compressed", "inner": dict(collectives), "number": number, "min_numel": 1})

    return configure


def main() -> int:
    """Run, and write the file; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON to write")
    parser.add_argument("--commit", help="what to call the commit, where there is no history")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--draws", type=int, default=4, help="of batches")
    given = parser.parse_args()
    torch.set_num_threads(1)
    peers = {"plain": plain, "int8": compressed("int8"), "fp8": compressed("fp8")}
    report: dict[str, Any] = {
        "environment": alone_environment("compressed.py", given.commit),
        "sent": sent(),
        "curves": curves(peers, "plain", given.steps, given.draws),
    }
    tell_alone(report, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
