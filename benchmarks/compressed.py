"""Gradients in int8 and fp8 beside gradients as they are: what they send, and what training makes of it.

    python benchmarks/compressed.py --out benchmarks/results/compressed.json

On the CPU, without other processes: bytes that a rank sends for a reduction, and losses of a small model that two
threads train from the same start on the same batches, on several draws of batches, for what chance alone does.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polyshard
import torch
from curves import Configure, curves
from measure import output_of
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
        "environment": {
            "command": "python benchmarks/compressed.py " + " ".join(sys.argv[1:]),
            "commit": given.commit or output_of("git", "rev-parse", "HEAD"),
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "device": "CPU",
        },
        "sent": sent(),
        "curves": curves(peers, "plain", given.steps, given.draws),
    }
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    shown = {key: value for key, value in report["curves"].items() if key != "losses_over_10_steps"}
    print(json.dumps({**report, "curves": shown}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
