"""Reserved memory over many steps whose sequences change in length: does the allocator's memory fall to pieces?

    python benchmarks/lengths.py --pretend 8 --steps 500 --out lengths.json
    PYTORCH_ALLOC_CONF=expandable_segments:True python benchmarks/lengths.py --pretend 8 --steps 500

Each peer trains from the same start on batches of as many sequences, whose length is drawn anew for each step, the same
for all peers: a multiple of 64 from a quarter of the workload's to the whole. Memory is the allocator's.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from typing import Any

from contenders import Contender, Site, contender
from measure import write
from memory import Memory
from ranks import Ranks
from runs import environment, job, make_parser, not_started
from workloads import WORKLOADS, Batches, Workload

_HANG_S = 150.0


def lengths(workload: Workload, steps: int) -> list[int]:
    grain = max(1, min(64, workload.seq // 4))
    draw = random.Random(0)
    return [grain * draw.randint(workload.seq // 4 // grain, workload.seq // grain) for _ in range(steps)]


def train(peer: Contender, workload: Workload, ranks: Ranks, steps: int, every: int) -> dict[str, Any]:
    """Memory of one peer after every so many steps."""
    memory = Memory(ranks.device)
    memory.settle()
    retries = memory.retries()
    step = peer.build(Site(workload, ranks.device, ranks.rank, ranks.world_size, peer.compiled))
    memory.settle()
    memory.reset_peaks()
    at: list[dict[str, Any]] = []
    began = time.perf_counter()
    for index, length in enumerate(lengths(workload, steps)):
        batches = Batches(dataclasses.replace(workload, seq=length), ranks.rank, ranks.device)
        loss = step(*batches.batch(index))
        if (index + 1) % every == 0 or index == 2:
            peaks = memory.peaks()
            at.append({"step": index + 1, "reserved_gib": memory.reserved(), "peak_gib": peaks and peaks[0]})
    final = float(loss)
    taken = time.perf_counter() - began
    step.close()
    del step
    memory.settle()
    return {"at": at, "seconds": round(taken, 1), "alloc_retries": memory.retries() - retries, "loss": final}


def table(found: dict[str, dict[str, Any]]) -> str:
    """Reserved GiB and the peak until then, by step."""
    lines = ["step".rjust(6) + "".join(f"{name:>24}" for name in found)]
    first = next(iter(found.values()))
    for position, row in enumerate(first["at"]):
        line = f"{row['step']:6}"
        for each in found.values():
            one = each["at"][position]
            known = one["reserved_gib"] is not None
            line += (f"{one['reserved_gib']:.3f} (peak {one['peak_gib']:.3f})" if known else "-").rjust(24)
        lines.append(line)
    lines += [f"{name}: {each['seconds']} s, retries {each['alloc_retries']}" for name, each in found.items()]
    return "\n".join(lines)


def main() -> int:
    """Run, print the table; returns the process's exit code."""
    parser = make_parser(__doc__, pretends=True)
    parser.set_defaults(pretend=8)
    parser.add_argument("--work", default="300m", choices=WORKLOADS)
    parser.add_argument("--peers", default="polyshard,fsdp2")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    given = parser.parse_args()
    code = not_started(given)
    if code is not None:
        return code
    with job(given, _HANG_S) as ranks:
        report: dict[str, Any] = {"environment": environment(ranks, "lengths.py", given.commit), "work": given.work}
        report["peers"] = found = {}
        for name in given.peers.split(","):
            found[name] = train(contender(name), WORKLOADS[given.work], ranks, given.steps, given.every)
            print(f"{name}: {found[name]['at'][-1]}", file=sys.stderr, flush=True)
            write(report, given.out, ranks.rank)
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
