"""Bandwidth of the collectives backends: gathers and reductions of a Llama-like block, alone and beside a GEMM.

    torchrun --standalone --nproc-per-node 4 benchmarks/gathers.py --out benchmarks/results/gathers.json
    torchrun --standalone --nproc-per-node 4 benchmarks/gathers.py --check
    torchrun --standalone --nproc-per-node 3 benchmarks/gathers.py --device cpu

The first W of the job's ranks form a group, for each W from 2 on; the others wait. Blocks are cut as the engine cuts
them, and once more without the alignment of shards where that makes a difference. Backends take turns within each
round. One operation that is not timed lines the devices up; then a fixed number of them lies between two CUDA events.
A time is the slowest rank's. Bandwidth is what each rank receives: (W-1)/W of the payload, per second.

"GEMM cost" is the time that a fixed number of matrix products takes longer because of the operations beside it, as a
share of the operations' own time alone. ``--check`` compares the backends' gathers with each other, bit by bit.
"""

from __future__ import annotations

import faulthandler
import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from clocks import DeviceClock, Gemm, HostClock
from measure import spread, undisturbed, write
from polyshard.interfaces import (
    PARAMETER_ALIGNMENT_BYTES,
    SLICE_ALIGNMENT_BYTES,
    BufferRole,
    Collectives,
    PluginContext,
    ReduceOp,
)
from polyshard.planning.layout import round_up
from polyshard_backends.gloo import GlooCollectives
from polyshard_backends.nccl import NcclCollectives
from polyshard_backends.symmetric import SymmetricCollectives
from ranks import Ranks
from runs import environment, make_parser

_MIB = 2**20
_ITEMSIZE = torch.bfloat16.itemsize
#: Seconds that a rank may stay away. One group takes some 20.
_TIMEOUT = timedelta(seconds=90)
#: Seconds after which a group's ranks say where they hang, before the others give them up.
_HANG_S = 75


@dataclass(frozen=True, slots=True)
class Settings:
    worlds: tuple[int, ...]
    mebibytes: tuple[int, ...]
    backends: tuple[str, ...]
    rounds: int
    gemm: tuple[int, int, int]
    deadline_s: float


class Variant:
    """One operation of one backend on shards of ``numel`` elements, with buffers of its own."""

    def __init__(self, name: str, operation: str, collectives: Collectives, numel: int, *, aligned: bool) -> None:
        self.name = name
        self.operation = operation
        self.aligned = aligned
        self.world_size = collectives.world_size
        self.nbytes = numel * self.world_size * _ITEMSIZE
        self.shard_nbytes = numel * _ITEMSIZE
        self._collectives = collectives
        self._numel = numel
        self._run: Callable[[], None] | None = None

    @property
    def key(self) -> str:
        cut = "aligned" if self.aligned else "as cut"
        return f"{self.operation}/{self.name}/{cut}/{self.nbytes}/{self.world_size}"

    def prepare(self) -> None:
        """Take memory, and run once: communicators and registrations are made here."""
        numel, collectives = self._numel, self._collectives
        device, total = collectives.device, numel * self.world_size
        if self.operation == "gather":
            with collectives.allocation(BufferRole.GATHER, self.nbytes):
                out = torch.empty(total, dtype=torch.bfloat16, device=device)
            own = out.narrow(0, collectives.rank * numel, numel)
            own.fill_(1.0)
            self._run = lambda: collectives.all_gather(out, own).wait()
        else:
            full = torch.ones(total, dtype=torch.bfloat16, device=device)
            result = torch.empty(numel, device=device)
            nbytes = collectives.scratch_nbytes(BufferRole.REDUCE, full.numel(), full.dtype, result.dtype)
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes else None

            def reduce() -> None:
                collectives.reduce_scatter(result, full, op=ReduceOp.MEAN, scratch=scratch).wait()

            self._run = reduce
        self.run()
        if device.type == "cuda":
            # What is timed runs on streams that are not ordered after this one.
            torch.cuda.synchronize(device)

    def run(self) -> None:
        """Issue the operation on the current stream, and order that stream after it."""
        assert self._run is not None
        self._run()

    def release(self) -> None:
        self._run = None


def block_shapes(nbytes: int) -> list[tuple[int, ...]]:
    """Parameters of a transformer block with grouped queries and a gated MLP, of about ``nbytes`` in bf16."""
    # 13 d^2 elements: 2.5 in attention, 10.5 in the MLP. Like models' own, widths have no factor of 3, 5 or 7: that
    # number of ranks would get aligned shards by luck.
    wanted = (nbytes / _ITEMSIZE / 13) ** 0.5 / 32
    width = 32 * min((n for n in range(1, 1024) if math.gcd(n, 105) == 1), key=lambda n: abs(n - wanted))
    narrow, wide = width // 4, width * 7 // 2
    return [
        (width,),
        (width, width),
        (narrow, width),
        (narrow, width),
        (width, width),
        (width,),
        (wide, width),
        (wide, width),
        (width, wide),
    ]


def shards(nbytes: int, world_size: int) -> Iterator[tuple[int, bool]]:
    """Elements that each rank has of the block: as the engine aligns large slices, and without, where that differs."""
    plain = -(-sum(map(math.prod, block_shapes(nbytes))) // world_size)
    yield round_up(plain, SLICE_ALIGNMENT_BYTES // _ITEMSIZE), True
    if plain * _ITEMSIZE % PARAMETER_ALIGNMENT_BYTES:
        yield plain, False


@contextmanager
def backends(names: Sequence[str], part: Collectives) -> Iterator[dict[str, Collectives]]:
    """The backends over ``part``'s ranks. All but gloo use its one communicator: they never overlap here."""
    context = PluginContext("benchmark", part.device, part.process_group, timeout=_TIMEOUT)
    made: dict[str, Collectives] = {}
    for name in names:
        if name == "gloo":
            made[name] = GlooCollectives(context)
        elif name == "nccl":
            made[name] = NcclCollectives(context, registered=False, communicators=1)
        elif name == "registered":
            made[name] = NcclCollectives(context, smallest_mib=0, communicators=1)
        elif name == "symmetric":
            made[name] = SymmetricCollectives(context, smallest_mib=0, communicators=1)
        else:
            raise SystemExit(f"no backend {name!r}; choose from gloo, nccl, registered, symmetric")
    try:
        yield made
    finally:
        for collectives in made.values():
            collectives.close()


def variants(part: dict[str, Collectives], mebibytes: int, world_size: int) -> list[Variant]:
    """What is timed for one payload."""
    found = []
    for numel, aligned in shards(mebibytes * _MIB, world_size):
        for name, collectives in part.items():
            found.append(Variant(name, "gather", collectives, numel, aligned=aligned))
        first = next(iter(part))
        found.append(Variant(first, "reduce", part[first], numel, aligned=aligned))
    return found


def repeats_for(nbytes: int) -> int:
    """Operations in one measurement: the same on every rank, so not from a time."""
    return max(3, min(12, 64 * _MIB // nbytes))


def products_for(nbytes: int, repeats: int) -> int:
    """Products that outlast ``repeats`` operations of ``nbytes`` even when both slow each other down."""
    # 0.7 ms each on an H200, and 150 GB/s as the slowest that an aligned operation is beside them.
    seconds = (repeats + 1) * (nbytes / 150e9 + 100e-6)
    return max(4, round(seconds / 0.7e-3) + 2)


def measure(
    everything: list[Variant], gemm: Gemm, clock: DeviceClock | HostClock, part: Collectives, rounds: int
) -> list[dict[str, Any]]:
    """Times of one payload on this rank, one value a round."""
    times: dict[str, dict[str, list[float]]] = {}
    for variant in everything:
        variant.prepare()
        times[variant.key] = {"alone_s": [], "together_s": [], "gemm_alone_s": [], "gemm_together_s": []}
    with undisturbed():
        for number in range(rounds + 1):
            for variant in everything:
                repeats = repeats_for(variant.nbytes)
                count = products_for(variant.nbytes, repeats)
                part.barrier()
                alone = clock.alone(variant, repeats)
                quiet = clock.products(gemm, count)
                part.barrier()
                together, loaded = clock.together(variant, repeats, gemm, count)
                if number:
                    into = times[variant.key]
                    into["alone_s"].append(alone)
                    into["together_s"].append(together)
                    into["gemm_alone_s"].append(quiet)
                    into["gemm_together_s"].append(loaded)
    rows = []
    for variant in everything:
        rows.append(
            {
                "key": variant.key,
                "world_size": variant.world_size,
                "backend": variant.name,
                "operation": variant.operation,
                "aligned": variant.aligned,
                "nbytes": variant.nbytes,
                "shard_nbytes": variant.shard_nbytes,
                "repeats": repeats_for(variant.nbytes),
                "products": products_for(variant.nbytes, repeats_for(variant.nbytes)),
                **times[variant.key],
            }
        )
        variant.release()
    return rows


def merged(reports: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row from all ranks' rows with its key: the slowest rank's time of each round, then spreads and ratios."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        for row in report:
            by_key.setdefault(row["key"], []).append(row)
    result = []
    for rows in by_key.values():
        row = dict(rows[0])
        worst = {
            name: [max(values) for values in zip(*(each.pop(name) for each in rows), strict=True)]
            for name in ("alone_s", "together_s", "gemm_alone_s", "gemm_together_s")
        }
        for name in worst:
            row.pop(name, None)
        received = row["nbytes"] * (row["world_size"] - 1) / row["world_size"]
        alone, together = worst["alone_s"], worst["together_s"]
        own = [row["repeats"] * seconds for seconds in alone]
        delays = [b - a for a, b in zip(worst["gemm_alone_s"], worst["gemm_together_s"], strict=True)]
        row["ms"] = spread([seconds * 1e3 for seconds in alone])
        row["gb_s"] = round(received / statistics.median(alone) / 1e9, 2)
        row["ms_beside_gemm"] = spread([seconds * 1e3 for seconds in together])
        row["gb_s_beside_gemm"] = round(received / statistics.median(together) / 1e9, 2)
        row["gemm_cost"] = spread([delay / seconds for delay, seconds in zip(delays, own, strict=True)])
        # Otherwise the last operations had the device to themselves.
        row["gemm_outlasted"] = all(
            loaded >= (row["repeats"] + 1) * seconds
            for loaded, seconds in zip(worst["gemm_together_s"], together, strict=True)
        )
        result.append(row)
    return result


def compare(part: dict[str, Collectives], world_size: int) -> list[str]:
    """Gather changing values with every backend; what differs from what the ranks are known to have sent."""
    problems = []
    for nbytes in (_MIB, 9 * _MIB):
        for n, aligned in shards(nbytes, world_size):
            total = n * world_size
            for name, collectives in part.items():
                device = collectives.device
                with collectives.allocation(BufferRole.GATHER, total * _ITEMSIZE):
                    buffers = [torch.empty(total, dtype=torch.bfloat16, device=device) for _ in range(2)]
                kept = []
                # Two buffers in turn and no pause: a gather that starts too early, or ends too late, is seen.
                for turn in range(12):
                    out = buffers[turn % 2]
                    own = out.narrow(0, collectives.rank * n, n)
                    own.copy_(sent(collectives.rank, turn, n, device))
                    collectives.all_gather(out, own).wait()
                    kept.append(out.clone())
                for turn, got in enumerate(kept):
                    expected = torch.cat([sent(rank, turn, n, device) for rank in range(world_size)])
                    wrong = (got.view(torch.int16) != expected.view(torch.int16)).nonzero().flatten()
                    if wrong.numel():
                        first = int(wrong[0])
                        problems.append(
                            f"{name}, {world_size} ranks, {nbytes // _MIB} MiB, {'aligned' if aligned else 'as cut'}, "
                            f"turn {turn}: {wrong.numel()} of {total} elements differ on rank {collectives.rank}, the "
                            f"first at {first}, in the slice of rank {first // n}: {got[first].item()} instead of "
                            f"{expected[first].item()}"
                        )
                        break
    return problems


def sent(rank: int, turn: int, numel: int, device: torch.device) -> torch.Tensor:
    """What a rank sends in a turn: differs between ranks, turns and positions, and is exact in bf16."""
    positions = torch.arange(numel, device=device, dtype=torch.int32)
    return ((positions * 7 + rank * 31 + turn * 101) % 251).to(torch.bfloat16)


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'W':>2} {'MiB':>5} {'operation':9} {'backend':11} {'cut':8}"
        f"{'ms':>9}{'GB/s':>8}{'beside':>9}{'GEMM cost':>11}"
    ]
    for row in sorted(
        rows, key=lambda r: (r["world_size"], r["operation"], round(r["nbytes"] / _MIB), r["backend"], not r["aligned"])
    ):
        lines.append(
            f"{row['world_size']:2} {row['nbytes'] / _MIB:5.0f} {row['operation']:9} {row['backend']:11} "
            f"{'aligned' if row['aligned'] else 'as cut':8}{row['ms']['median']:9.3f}{row['gb_s']:8.1f}"
            f"{row['gb_s_beside_gemm']:9.1f}{row['gemm_cost']['median']:11.2f}"
            f"{'' if row['gemm_outlasted'] else '  GEMM ended first'}"
        )
    return "\n".join(lines)


def run(ranks: Ranks, whole: Collectives, settings: Settings, *, check: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Everything, on this rank; rows and problems of the groups that it is in."""
    clock: DeviceClock | HostClock = DeviceClock(ranks.device) if ranks.device.type == "cuda" else HostClock()
    gemm = Gemm(settings.gemm, ranks.device)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    begin = time.monotonic()
    for world_size in settings.worlds:
        lists = [list(range(world_size)), list(range(world_size, ranks.world_size))]
        faulthandler.dump_traceback_later(_HANG_S, exit=True)
        part = whole.partition([members for members in lists if members])
        error = ""
        if ranks.rank < world_size:
            # A backend that falls back says so, and its rows would otherwise be taken for what they are not.
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    with backends(settings.backends, part) as made:
                        if check:
                            problems += compare(made, world_size)
                        for mebibytes in settings.mebibytes if not check else ():
                            rows += measure(variants(made, mebibytes, world_size), gemm, clock, part, settings.rounds)
                except Exception:
                    error = f"{world_size} ranks: {traceback.format_exc()}"
            messages = dict.fromkeys(str(warning.message) for warning in said)
            problems += [f"{world_size} ranks: {text}" for text in messages if text.startswith("collectives ")]
        error = ranks.meet(error)
        faulthandler.cancel_dump_traceback_later()
        if error:
            problems.append(error)
            break
        part.close()
        if ranks.rank == 0:
            print(f"{world_size} ranks done after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
        if ranks.decided(time.monotonic() - begin > settings.deadline_s):
            problems.append(f"stopped after {world_size} ranks: {settings.deadline_s:g} s were over")
            break
    return rows, problems


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def main() -> int:
    """Run; print the table on rank 0. The exit code is 1 where something went wrong or differed."""
    parser = make_parser(__doc__)
    parser.add_argument("--worlds", type=_numbers, help="numbers of ranks, as 2,3,4; by default all from 2 on")
    parser.add_argument("--sizes", type=_numbers, help="payloads in MiB; by default 4,16,64,256,512")
    parser.add_argument(
        "--backends",
        help="of gloo, nccl, registered, symmetric (with one number of ranks a run); reductions use the first",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=50.0, help="seconds after which no further group is begun")
    parser.add_argument("--check", action="store_true", help="compare gathered bits instead of timing")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    torch.set_num_threads(1)
    ranks = Ranks(given.device, _TIMEOUT)
    default = tuple(range(2, ranks.world_size + 1))
    settings = Settings(
        worlds=tuple(world for world in given.worlds or default if 2 <= world <= ranks.world_size),
        mebibytes=given.sizes or ((4, 16, 64, 256, 512) if cuda else (1,)),
        backends=tuple((given.backends or ("nccl,registered" if cuda else "gloo")).split(",")),
        rounds=given.rounds,
        gemm=(4096, 4096, 14336) if cuda else (64, 64, 64),
        deadline_s=given.deadline,
    )
    if "symmetric" in settings.backends and len(settings.worlds) > 1:
        # torch numbers a process's meetings over such memory through all groups. Ranks that some of them took part in
        # would never meet the others.
        parser.error("symmetric needs --worlds with one number.")
    context = PluginContext("benchmark", ranks.device, timeout=_TIMEOUT)
    whole: Collectives = NcclCollectives(context, communicators=1) if cuda else GlooCollectives(context)
    rows, problems = run(ranks, whole, settings, check=given.check)
    reports = whole.all_gather_object((rows, problems))
    if ranks.rank == 0:
        merged_rows = merged([found for found, _ in reports])
        all_problems = sorted({problem for _, found in reports for problem in found})
        report = {
            "environment": environment(ranks, "gathers.py", given.commit),
            "problems": all_problems,
            "rows": merged_rows,
        }
        write(report, given.out, ranks.rank)
        if merged_rows:
            print(table(merged_rows))
        for problem in all_problems:
            print(problem)
        if given.check and not all_problems:
            print(f"gathers of {', '.join(settings.backends)} are right with {settings.worlds} ranks")
    whole.close()
    ranks.close()
    return int(any(found for _, found in reports))


if __name__ == "__main__":
    sys.exit(main())
