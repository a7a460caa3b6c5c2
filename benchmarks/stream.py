"""Whole weights handed from trainer to engine: ``polyshard.stream`` beside FSDP2's ``full_tensor()`` of each parameter.

    torchrun --standalone --nproc-per-node 2 benchmarks/stream.py --out benchmarks/results/stream.json
    torchrun --standalone --nproc-per-node 2 benchmarks/stream.py --one-gpu --work 300m
    torchrun --standalone --nproc-per-node 2 benchmarks/stream.py --device cpu --work tiny --rounds 2 --times 3
    python benchmarks/stream.py --pretend 8 --device cpu --work host

The engine is a tensor in bf16 for each weight, on every rank's device, which what is handed out is copied to; masters
are fp32. FSDP2 comes twice: a gather of fp32, cast behind it, as most trainers do, and a cast before the gather. All
ways take turns within a round, on the models of that round; a time is from the first call until the device is through,
the slowest rank's. What the engine got is compared between the ways, bit by bit. With ``--one-gpu`` all ranks share a
device and NCCL takes them for hosts; with ``--pretend`` nothing travels, and what is left is the host's own time.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polyshard
import torch
from contenders import Site, fill_shards
from measure import spread, turned, undisturbed, write
from memory import Memory
from ranks import Ranks
from runs import environment, job, make_parser, not_started, together
from torch import nn
from workloads import WORKLOADS, Block, Workload, initializer, meta_model

_HANG_S = 150.0
_SENT = torch.bfloat16

Pairs = Iterator[tuple[str, torch.Tensor]]


class Engine:
    """What a generating engine does with weights: it copies them to its own."""

    def __init__(self, shapes: dict[str, torch.Size], device: torch.device) -> None:
        self.weights = {name: torch.zeros(shape, dtype=_SENT, device=device) for name, shape in shapes.items()}

    @torch.no_grad()
    def load(self, pairs: Pairs) -> int:
        """Take all of ``pairs``; returns how many there were."""
        count = 0
        for name, tensor in pairs:
            self.weights[name].copy_(tensor)
            count += 1
        return count

    def clear(self) -> None:
        for weight in self.weights.values():
            weight.zero_()


def _polyshard(workload: Workload, ranks: Ranks, pretended: bool) -> nn.Module:
    model = meta_model(workload)
    collectives: Any = "auto"
    if pretended:
        collectives = {"name": "fake", "rank": 0, "world_size": ranks.world_size}
    config = polyshard.ShardConfig(
        precision="bf16",
        policy={"name": "module_class", "classes": [Block]},
        device=ranks.device,
        collectives=collectives,
    )
    return polyshard.shard(model, config, initializer=initializer(model))


def _fsdp2(workload: Workload, ranks: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = meta_model(workload)
    for unit in model.blocks:
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    site = Site(workload, ranks.device, ranks.rank, ranks.world_size, compiled=False)
    fill_shards(model, site, ranks.world_size)
    return model


def _full_tensors(model: nn.Module, *, cast_first: bool) -> Pairs:
    for name, parameter in model.named_parameters():
        placed: Any = parameter.detach()
        yield name, placed.to(_SENT).full_tensor() if cast_first else placed.full_tensor().to(_SENT)


def _streamed(model: nn.Module, bucket_nbytes: int | None = None) -> Pairs:
    for names, tensors in polyshard.stream(model, dtype=_SENT, bucket_nbytes=bucket_nbytes):
        yield from zip(names, tensors, strict=True)


#: Of which model, and the pairs out of it.
WAYS: dict[str, tuple[str, Callable[[nn.Module], Pairs]]] = {
    "fsdp2 full_tensor": ("fsdp2", lambda model: _full_tensors(model, cast_first=False)),
    "fsdp2 cast, full_tensor": ("fsdp2", lambda model: _full_tensors(model, cast_first=True)),
    "polyshard stream": ("polyshard", _streamed),
    "polyshard stream, 64 MiB": ("polyshard", lambda model: _streamed(model, 64 << 20)),
}


def measure(
    ranks: Ranks, workload: Workload, ways: Sequence[str], times: int, pretended: bool
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each way, and whether the engine got the same as by the first."""
    memory = Memory(ranks.device)
    memory.settle()
    models: dict[str, nn.Module] = {}
    with together(ranks):
        for kind in dict.fromkeys(WAYS[way][0] for way in ways):
            models[kind] = _fsdp2(workload, ranks) if kind == "fsdp2" else _polyshard(workload, ranks, pretended)
        engine = Engine({name: each.shape for name, each in meta_model(workload).named_parameters()}, ranks.device)
    first: dict[str, torch.Tensor] = {}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        kind, pairs = WAYS[way]
        with together(ranks):
            engine.clear()
            ranks.synchronize()
            memory.reset_peaks()
            before = memory.allocated() or 0.0
            count = engine.load(pairs(models[kind]))
            peaks = memory.peaks()
            first = first or {name: weight.clone() for name, weight in engine.weights.items()}
            same = all(torch.equal(weight, first[name]) for name, weight in engine.weights.items())
            found[way] = {"tensors": count, "more_mib": peaks and round((peaks[0] - before) * 1024, 1)}
            found[way]["same"] = None if pretended else same
    first.clear()
    with undisturbed():
        for number in range(times):
            for way in turned(ways, number):
                kind, pairs = WAYS[way]
                with together(ranks):
                    ranks.synchronize()
                    began = time.perf_counter()
                    engine.load(pairs(models[kind]))
                    ranks.synchronize()
                    taken[way].append((time.perf_counter() - began) * 1e3)
    for way in ways:
        found[way]["ms"] = spread(ranks.largest(taken[way]))
    return found


def main() -> int:
    """Run, print a line for each row; returns the process's exit code."""
    parser = make_parser(__doc__, pretends=True)
    parser.add_argument("--work", default="300m,1b")
    parser.add_argument("--ways", help="with + in the place of each comma; all where left out")
    parser.add_argument("--rounds", type=int, default=3, help="with new models each")
    parser.add_argument("--times", type=int, default=7, help="that each way runs in a round")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first device")
    given = parser.parse_args()
    code = not_started(given)
    if code is not None:
        return code
    if given.one_gpu:
        # One host would refuse two ranks of one device.
        os.environ.update(NCCL_HOSTID=f"host{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        os.environ["LOCAL_RANK"] = "0"
    ways = [name.replace("+", ",") for name in given.ways.split(",")] if given.ways else list(WAYS)
    with job(given, _HANG_S) as ranks:
        report: dict[str, Any] = {"environment": environment(ranks, "stream.py", given.commit), "rows": []}
        report["environment"]["one_gpu"] = given.one_gpu
        for work in given.work.split(","):
            for number in range(given.rounds):
                faulthandler.dump_traceback_later(_HANG_S, exit=True)
                # The others' results are compared with those of the first.
                found = measure(ranks, WORKLOADS[work], turned(ways, number), given.times, bool(given.pretend))
                for way in ways:
                    _add(report, ranks, given.out, {"workload": work, "way": way, "round": number, **found[way]})
    return 0


def _add(report: dict[str, Any], ranks: Ranks, out: Path | None, row: dict[str, Any]) -> None:
    report["rows"].append(row)
    write(report, out, ranks.rank)
    if ranks.rank == 0:
        same = {None: "nothing compared", True: "the same", False: "OTHER VALUES"}[row["same"]]
        print(
            f"{row['workload']:5} {row['way']:25} {row['ms']['median']:9.2f} ms ({row['ms']['min']:.2f} to "
            f"{row['ms']['max']:.2f}), {row['tensors']} tensors, {row['more_mib'] or 0:.0f} MiB more, {same}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
